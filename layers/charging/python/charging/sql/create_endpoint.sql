-- Claims the idempotency key and commits the webhook endpoint and its stored response, or says why not. Nothing is
-- admitted where the principal has all there can be. The answer is then that of a statement to be run again: the caller
-- counts before, so it happens where creations race for the last place.
--
-- Besides the key's advisory lock it takes the row locks of its own new rows. Where another creation of the principal's has
-- been committed since this statement's snapshot, or is about to be, both have the same number: a unique violation. It is
-- the lowest that is free, so that no number beyond the limit is ever given, whatever was created and deleted since the
-- snapshot. Counts by webhook_endpoints_of_principal. READ COMMITTED.
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
        (
            SELECT min(free)
            FROM generate_series(1, %(limit)s::int) AS free
            WHERE NOT EXISTS (
                SELECT FROM webhook_endpoints WHERE principal = %(principal)s AND number = free AND deleted_at IS NULL
            )
        ),
        %(url)s, %(event_types)s::text[]
    FROM won
)
\ir parts/answer.sql
