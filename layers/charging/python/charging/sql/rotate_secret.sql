-- Replaces the secret version that is named, where it is the endpoint's: the next one signs, and this one too until the
-- overlap ends. Run twice it comes to the same, as the version is another one by then. Locks that one row.
UPDATE webhook_endpoints
SET secret_version = secret_version + 1,
    previous_signs_until = now() + make_interval(hours => %(overlap_hours)s::int)
WHERE id = %(endpoint_id)s AND principal = %(principal)s AND deleted_at IS NULL
  AND secret_version = %(secret_version)s
RETURNING id
