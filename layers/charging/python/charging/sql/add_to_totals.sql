-- Adds one charge to its principal's total of the currency and day. Locks that one row.
INSERT INTO charge_totals (principal, currency, day, charges, amount_cents)
VALUES (%(principal)s, %(currency)s, %(day)s, 1, %(amount_cents)s)
ON CONFLICT (principal, currency, day) DO UPDATE
SET charges = charge_totals.charges + 1,
    amount_cents = charge_totals.amount_cents + EXCLUDED.amount_cents
