-- The charges that are known to have no outbox row, up to a limit, in the order of their ids. Reads the table by its
-- primary key; locks and writes nothing.
SELECT charge_id, found_at
FROM charges_without_outbox
ORDER BY charge_id
LIMIT %(limit)s
