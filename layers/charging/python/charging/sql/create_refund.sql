-- Claims the idempotency key and commits the refund, its event, the event's deliveries and the stored response, or says
-- why not. Where the charge has not so much left, the refusal is what is committed, and nothing else.
--
-- Besides the key's advisory lock it locks the charge's row, so that refunds of one charge go one after another, each at
-- most as long as lock_timeout: FOR UPDATE reads what the one before has committed, whatever the statement's snapshot
-- says. READ COMMITTED.
WITH
\ir parts/find_key.sql
charge AS MATERIALIZED (
    SELECT amount_cents - refunded_cents >= %(amount_cents)s AS has_enough_left
    FROM charges
    WHERE id = %(charge_id)s AND principal = %(principal)s AND (SELECT held FROM locked)
    FOR UPDATE
),
admitted AS (
    SELECT
        CASE WHEN has_enough_left THEN %(response_status)s ELSE %(refusal_status)s END::smallint AS response_status,
        CASE WHEN has_enough_left THEN %(response_headers)s ELSE %(refusal_headers)s END::jsonb AS response_headers,
        CASE WHEN has_enough_left THEN %(response_body)s ELSE %(refusal_body)s END::text AS response_body
    FROM charge
),
\ir parts/claim_key.sql
refunded AS (
    UPDATE charges
    SET refunded_cents = refunded_cents + %(amount_cents)s,
        refunds = refunds + 1
    FROM won
    WHERE id = %(charge_id)s AND won.response_status = %(response_status)s
    RETURNING refunds AS number
),
-- The charge's own event is the first of its aggregate, and its refunds' follow in their order.
effect AS (
    INSERT INTO refunds (id, charge_id, number, amount_cents, reference)
    SELECT %(refund_id)s, %(charge_id)s, number, %(amount_cents)s, %(reference)s
    FROM refunded
    RETURNING number + 1 AS sequence, created_at
),
\ir parts/announce.sql
\ir parts/answer.sql
