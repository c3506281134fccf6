-- Claims the idempotency key and commits the charge, its event, the event's deliveries and the stored response, or says
-- why not.
--
-- Always returns one row:
--   created  whether this call made the charge
--   held     whether it got the key's advisory lock; null when a stored row was found first
--   others   the row that is stored under the key and still counts, all null when there is none
-- Not created, held and nothing stored: somebody committed the key, or purged it, after this statement's
-- snapshot was taken. Run the statement again: the new snapshot sees what is there now.
--
-- Reads idempotency_keys by primary key. A replay stops there: no lock, no row lock, no transaction id, no WAL.
-- Otherwise takes a transaction-level advisory lock without waiting, so that a twin in flight is told at
-- once, and then the row locks of its own new rows. The principal's endpoints are looked up by
-- webhook_endpoints_of_principal and not locked: one that is deleted meanwhile leaves a delivery that the dispatcher gives
-- up. READ COMMITTED.
WITH stored AS (
    SELECT status, fingerprint, response_status, response_headers, response_body
    FROM idempotency_keys
    WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
      AND (expires_at > now() OR status = 'STARTED')
),
locked AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(
        hash_record_extended(ROW(%(principal)s::text, %(endpoint)s::text, %(key)s::uuid), 0)
    ) AS held
    WHERE NOT EXISTS (SELECT FROM stored)
),
taken_over AS (
    UPDATE idempotency_keys
    SET fingerprint = %(fingerprint)s,
        response_status = %(response_status)s,
        response_headers = %(response_headers)s::jsonb,
        response_body = %(response_body)s,
        created_at = now(),
        expires_at = now() + make_interval(hours => %(retention_hours)s::int)
    FROM locked
    WHERE held
      AND principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
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
    FROM locked
    WHERE held AND NOT EXISTS (SELECT FROM taken_over)
    ON CONFLICT (principal, endpoint, key) DO NOTHING
    RETURNING 1
),
won AS MATERIALIZED (
    SELECT 1 AS row FROM taken_over UNION ALL SELECT 1 AS row FROM claimed
),
charged AS (
    INSERT INTO charges (id, principal, amount_cents, currency, reference)
    SELECT %(charge_id)s, %(principal)s, %(amount_cents)s, %(currency)s, %(reference)s
    FROM won
),
event AS MATERIALIZED (
    SELECT (%(event)s::jsonb || jsonb_build_object(
        'time', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
    ))::text AS payload
    FROM won
),
announced AS (
    INSERT INTO outbox (id, event_type, aggregate_id, payload)
    SELECT %(event_id)s, %(event_type)s, %(charge_id)s, payload
    FROM event
),
-- The first event of its charge, as in the outbox. Also for a disabled endpoint: its deliveries are held.
addressed AS (
    INSERT INTO outbox_deliveries (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)
    SELECT endpoint.id, %(event_id)s, %(event_type)s, %(charge_id)s, 1, event.payload
    FROM event
    JOIN webhook_endpoints AS endpoint ON endpoint.principal = %(principal)s
    WHERE endpoint.deleted_at IS NULL AND %(event_type)s = ANY (endpoint.event_types)
    ON CONFLICT DO NOTHING
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
