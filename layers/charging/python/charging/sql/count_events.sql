-- How many events an operator selects, of each state and type. Counts no further than `bound`.
--
-- Run it unprepared. Uses the indexes that list_events.sql uses, and locks and writes nothing either.
WITH
\ir parts/select_events.sql
bounded AS (
    SELECT state, event_type
    FROM selected
    LIMIT %(bound)s
)
SELECT state, event_type, count(*) AS number
FROM bounded
GROUP BY state, event_type
ORDER BY array_position(%(states)s::text[], state), event_type
