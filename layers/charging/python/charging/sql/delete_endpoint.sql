-- Marks an endpoint as deleted; one that is already stays as it is. The dispatcher gives up what is still to be sent to
-- it. Locks that one row.
UPDATE webhook_endpoints
SET deleted_at = COALESCE(deleted_at, now())
WHERE id = %(endpoint_id)s AND principal = %(principal)s
RETURNING id
