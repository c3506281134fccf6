-- Writes down where the reconciliation begins, unless it has begun: at the oldest charge whose published event is kept, or,
-- while there are no charges yet, at the first that is to come. Returns a row where it did. Locks that one row.
INSERT INTO reconciliation (checked_until)
SELECT
    now() - CASE
        WHEN EXISTS (SELECT FROM charges) THEN make_interval(hours => 24 * %(retention_days)s)
        ELSE make_interval(secs => %(settled_seconds)s)
    END
ON CONFLICT (is_the_only_row) DO NOTHING
RETURNING checked_until
