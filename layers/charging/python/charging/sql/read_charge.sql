-- Reads one charge of a principal by primary key.
SELECT id, amount_cents, currency, reference
FROM charges
WHERE id = %(charge_id)s AND principal = %(principal)s
