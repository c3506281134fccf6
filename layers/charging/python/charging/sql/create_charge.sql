-- Claims the idempotency key and commits the charge, its event, the event's deliveries and the stored response, or says
-- why not. Besides the key's advisory lock it takes the row locks of its own new rows. READ COMMITTED.
WITH
\ir parts/claim.sql
-- A charge's own event is the first of its charge.
effect AS (
    INSERT INTO charges (id, principal, amount_cents, currency, reference)
    SELECT %(charge_id)s, %(principal)s, %(amount_cents)s, %(currency)s, %(reference)s
    FROM won
    RETURNING 1 AS sequence, created_at
),
\ir parts/announce.sql
\ir parts/answer.sql
