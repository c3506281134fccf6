-- Adds one event to its principal's totals of the currency and day. Locks that one row.
INSERT INTO charge_totals (principal, currency, day, charges, amount_cents, refunds, refunded_cents)
VALUES (
    %(principal)s, %(currency)s, %(day)s,
    %(charges)s, %(amount_cents)s, %(refunds)s, %(refunded_cents)s
)
ON CONFLICT (principal, currency, day) DO UPDATE
SET charges = charge_totals.charges + EXCLUDED.charges,
    amount_cents = charge_totals.amount_cents + EXCLUDED.amount_cents,
    refunds = charge_totals.refunds + EXCLUDED.refunds,
    refunded_cents = charge_totals.refunded_cents + EXCLUDED.refunded_cents
