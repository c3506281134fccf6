-- The events that an operator selects, as the step `selected`. Those that are named do not come by way of the states: amid
-- an outage the statistics may be from before it, and have outbox_due look empty when it is the whole backlog.
named AS (
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
    SELECT id, event_type, state, since
    FROM event
    WHERE state = ANY (%(states)s)
      AND (%(event_type)s::text IS NULL OR event_type = %(event_type)s)
      AND (%(since)s::timestamptz IS NULL OR since >= %(since)s)
      AND since < %(until)s
),
