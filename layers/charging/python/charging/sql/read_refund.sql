-- Reads one refund of a principal's charge, both by primary key.
SELECT refunds.id, charge_id, refunds.amount_cents, currency, refunds.reference
FROM refunds
JOIN charges ON charges.id = charge_id
WHERE refunds.id = %(refund_id)s AND charge_id = %(charge_id)s AND principal = %(principal)s
