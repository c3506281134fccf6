-- Claims the idempotency key and commits the webhook endpoint and its stored response, or says why not: in the terms of
-- create_charge.sql, with its row and its reruns.
--
-- The advisory lock is the principal's and not the key's, so that one caller's endpoints are created one after another
-- and can be counted. Over the limit nothing is written, and the row is that of a statement to be run again: the
-- caller counts before, so this happens where two creations race for the last place.
--
-- Reads idempotency_keys by primary key and counts by webhook_endpoints_of_principal. READ COMMITTED.
WITH stored AS (
    SELECT status, fingerprint, response_status, response_headers, response_body
    FROM idempotency_keys
    WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
      AND (expires_at > now() OR status = 'STARTED')
),
locked AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(hash_record_extended(ROW(%(principal)s::text, %(endpoint)s::text), 0)) AS held
    WHERE NOT EXISTS (SELECT FROM stored)
),
admitted AS MATERIALIZED (
    SELECT 1 AS row
    FROM locked
    WHERE held
      AND %(limit)s > (SELECT count(*) FROM webhook_endpoints WHERE principal = %(principal)s AND deleted_at IS NULL)
),
taken_over AS (
    UPDATE idempotency_keys
    SET fingerprint = %(fingerprint)s,
        response_status = %(response_status)s,
        response_headers = %(response_headers)s::jsonb,
        response_body = %(response_body)s,
        created_at = now(),
        expires_at = now() + make_interval(hours => %(retention_hours)s::int)
    FROM admitted
    WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
      AND expires_at <= now() AND status = 'COMPLETED'
    RETURNING 1
),
claimed AS (
    INSERT INTO idempotency_keys (
        principal, endpoint, key, fingerprint, status,
        response_status, response_headers, response_body, expires_at
    )
    SELECT
        %(principal)s, %(endpoint)s, %(key)s, %(fingerprint)s, 'COMPLETED',
        %(response_status)s, %(response_headers)s::jsonb, %(response_body)s,
        now() + make_interval(hours => %(retention_hours)s::int)
    FROM admitted
    WHERE NOT EXISTS (SELECT FROM taken_over)
    ON CONFLICT (principal, endpoint, key) DO NOTHING
    RETURNING 1
),
won AS MATERIALIZED (
    SELECT 1 AS row FROM taken_over UNION ALL SELECT 1 AS row FROM claimed
),
registered AS (
    INSERT INTO webhook_endpoints (id, principal, url, event_types)
    SELECT %(endpoint_id)s, %(principal)s, %(url)s, %(event_types)s::text[]
    FROM won
)
SELECT
    EXISTS (SELECT FROM won) AS created,
    locked.held,
    stored.status,
    stored.fingerprint,
    stored.response_status,
    stored.response_headers,
    stored.response_body
FROM (VALUES (true)) AS always (answers)
LEFT JOIN locked ON true
LEFT JOIN stored ON true
