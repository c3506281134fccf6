-- Holds all deliveries of an endpoint; one that is disabled already keeps its reason. Locks that one row.
UPDATE webhook_endpoints
SET disabled_at = COALESCE(disabled_at, now()),
    disabled_reason = COALESCE(disabled_reason, 'owner')
WHERE id = %(endpoint_id)s AND principal = %(principal)s AND deleted_at IS NULL
RETURNING id
