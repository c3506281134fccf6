-- Reads a principal's endpoints, or the one that is asked for, the oldest first. Uses webhook_endpoints_of_principal.
SELECT
    id, url, event_types, secret_version, disabled_reason,
    CASE WHEN previous_signs_until > now() THEN previous_signs_until END AS previous_signs_until,
    CASE WHEN resumes_at > now() THEN resumes_at END AS resumes_at
FROM webhook_endpoints
WHERE principal = %(principal)s AND deleted_at IS NULL
  AND (%(endpoint_id)s::uuid IS NULL OR id = %(endpoint_id)s)
ORDER BY id
