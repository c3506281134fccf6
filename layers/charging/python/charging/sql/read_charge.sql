-- Reads one charge of a principal by primary key.
SELECT id, amount_cents, currency, reference, refunded_cents
FROM charges
WHERE id = %(charge_id)s AND principal = %(principal)s
