-- Turns spans into instants by the database's clock. One that is not given is null; a window without an end ends now, so
-- that what comes into it later, by the very act of an operator, is not in it. Locks and writes nothing.
SELECT
    COALESCE(%(since)s::timestamptz, now() - %(since_ago)s::interval) AS since,
    COALESCE(%(until)s::timestamptz, now() - %(until_ago)s::interval, now()) AS until
