-- The claim of an operation that has nothing to refuse: whoever may work under the key is admitted, with the response.
\ir find_key.sql
admitted AS (
    SELECT
        %(response_status)s::smallint AS response_status,
        %(response_headers)s::jsonb AS response_headers,
        %(response_body)s::text AS response_body
    FROM locked
    WHERE held
),
\ir claim_key.sql
