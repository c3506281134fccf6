-- Checks the charges that were there before refunds, while charges go on.
ALTER TABLE charges VALIDATE CONSTRAINT charges_refunded_is_at_most_the_amount;
