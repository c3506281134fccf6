-- Claims the idempotency key and commits the webhook endpoint and its stored response, or says why not. Nothing is
-- admitted where the principal has all there can be. The answer is then that of a statement to be run again: the caller
-- counts before, so it happens where creations race for the last place.
--
-- Besides the key's advisory lock it takes the row locks of its own new rows. Where another creation of the principal's has
-- been committed since this statement's snapshot, or is about to be, both have the same number: a unique violation.
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
      AND %(limit)s > (SELECT count(*) FROM webhook_endpoints WHERE principal = %(principal)s AND deleted_at IS NULL)
),
\ir parts/claim_key.sql
registered AS (
    INSERT INTO webhook_endpoints (id, principal, number, url, event_types)
    SELECT
        %(endpoint_id)s, %(principal)s,
        1 + COALESCE(
            (SELECT max(number) FROM webhook_endpoints WHERE principal = %(principal)s AND deleted_at IS NULL), 0
        ),
        %(url)s, %(event_types)s::text[]
    FROM won
)
\ir parts/answer.sql
