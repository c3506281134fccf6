-- How many events an operator selects, of each state and type. Counts no further than `bound`.
--
-- Run it unprepared. Uses the indexes that list_events.sql uses, and locks and writes nothing either.
WITH named AS (
    SELECT
        id, event_type,
        CASE
            WHEN published_at IS NOT NULL THEN 'published'
            WHEN failed_at IS NOT NULL THEN 'parked'
            ELSE 'waiting'
        END AS state,
        COALESCE(published_at, failed_at, created_at) AS since
    FROM outbox
    WHERE (%(ids)s::uuid[] IS NOT NULL OR %(aggregate_id)s::uuid IS NOT NULL)
      AND (%(ids)s::uuid[] IS NULL OR id = ANY (%(ids)s::uuid[]))
      AND (%(aggregate_id)s::uuid IS NULL OR aggregate_id = %(aggregate_id)s)
),
unnamed AS (
    SELECT id, event_type, 'waiting' AS state, created_at AS since
    FROM outbox
    WHERE published_at IS NULL AND failed_at IS NULL
    UNION ALL
    SELECT id, event_type, 'parked', failed_at
    FROM outbox
    WHERE failed_at IS NOT NULL
    UNION ALL
    SELECT id, event_type, 'published', published_at
    FROM outbox
    WHERE published_at IS NOT NULL
),
event AS (
    SELECT id, event_type, state, since FROM named
    UNION ALL
    SELECT id, event_type, state, since
    FROM unnamed
    WHERE %(ids)s::uuid[] IS NULL AND %(aggregate_id)s::uuid IS NULL
),
selected AS (
    SELECT state, event_type
    FROM event
    WHERE state = ANY (%(states)s)
      AND (%(event_type)s::text IS NULL OR event_type = %(event_type)s)
      AND (%(since)s::timestamptz IS NULL OR since >= %(since)s)
      AND since < %(until)s
    LIMIT %(bound)s
)
SELECT state, event_type, count(*) AS number
FROM selected
GROUP BY state, event_type
ORDER BY array_position(%(states)s::text[], state), event_type
