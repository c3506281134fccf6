-- The way into every claiming statement: what is stored under the key, and if nothing is, the right to work under it.
--
-- Reads idempotency_keys by primary key. A replay stops there: no lock, no row lock, no transaction id, no WAL.
-- Otherwise takes a transaction-level advisory lock without waiting, so that a twin in flight is told at once.
stored AS (
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
