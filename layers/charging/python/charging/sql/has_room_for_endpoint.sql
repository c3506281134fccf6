-- Whether a principal may have one more endpoint, or has a live key, which is answered from what is stored. Counts by
-- webhook_endpoints_of_principal and reads idempotency_keys by primary key.
SELECT
    %(limit)s > (SELECT count(*) FROM webhook_endpoints WHERE principal = %(principal)s AND deleted_at IS NULL)
    OR EXISTS (
        SELECT FROM idempotency_keys
        WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
          AND (expires_at > now() OR status = 'STARTED')
    ) AS has_room
