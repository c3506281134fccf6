-- Takes events off the list of those that are missing that have come since, and returns how many. Looks at the first ones
-- on the list up to a limit: once those are settled, the next ones are the first.
--
-- Locks the rows that it looks at until the statement's own commit, and skips those that somebody else holds.
WITH expected AS (
    SELECT aggregate_id, sequence, event_type
    FROM missing_events
    ORDER BY aggregate_id, sequence
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
\ir parts/look_for_events.sql
forgotten AS (
    DELETE FROM missing_events
    WHERE (aggregate_id, sequence) IN (SELECT aggregate_id, sequence FROM checked WHERE is_there)
    RETURNING 1
)
SELECT count(*)
FROM forgotten
