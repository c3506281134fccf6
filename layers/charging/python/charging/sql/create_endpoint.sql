-- Claims the idempotency key and commits the webhook endpoint and its stored response, or says why not. Nothing is
-- admitted where the principal has another one created at this moment, so that they can be counted, or has all there can
-- be. The answer is then that of a statement to be run again: the caller counts before, so the second happens where two
-- creations race for the last place.
--
-- Besides the key's advisory lock it takes one of the principal's, without waiting, and the row locks of its own new rows.
-- Counts by webhook_endpoints_of_principal. READ COMMITTED.
WITH
\ir parts/find_key.sql
admitted AS MATERIALIZED (
    SELECT
        %(response_status)s::smallint AS response_status,
        %(response_headers)s::jsonb AS response_headers,
        %(response_body)s::text AS response_body
    FROM locked
    WHERE held
      AND pg_try_advisory_xact_lock(hash_record_extended(ROW(%(principal)s::text, %(endpoint)s::text), 0))
      AND %(limit)s > (SELECT count(*) FROM webhook_endpoints WHERE principal = %(principal)s AND deleted_at IS NULL)
),
\ir parts/claim_key.sql
registered AS (
    INSERT INTO webhook_endpoints (id, principal, url, event_types)
    SELECT %(endpoint_id)s, %(principal)s, %(url)s, %(event_types)s::text[]
    FROM won
)
\ir parts/answer.sql
