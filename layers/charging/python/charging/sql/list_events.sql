-- The events that an operator selects, those first that came into their state first.
--
-- Run it unprepared: each condition that is not asked for then disappears before the statement is planned, and so do the
-- states. What is left uses, as the selection has it, the primary key, the index of outbox_places_are_taken_once, or the
-- state's own: outbox_due, outbox_failed, outbox_published. Events that are named do not come by way of the states: amid
-- an outage the statistics may be from before it, and have outbox_due look empty when it is the whole backlog.
--
-- Locks and writes nothing.
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
    SELECT id, state, since
    FROM event
    WHERE state = ANY (%(states)s)
      AND (%(event_type)s::text IS NULL OR event_type = %(event_type)s)
      AND (%(since)s::timestamptz IS NULL OR since >= %(since)s)
      AND since < %(until)s
    ORDER BY since, id
    LIMIT %(limit)s
)
SELECT
    outbox.id,
    outbox.event_type,
    outbox.aggregate_id,
    outbox.sequence,
    selected.state,
    EXTRACT(EPOCH FROM now() - selected.since)::float8 AS seconds_in_state,
    EXTRACT(EPOCH FROM now() - outbox.created_at)::float8 AS age_seconds,
    CASE
        WHEN selected.state = 'waiting' THEN EXTRACT(EPOCH FROM outbox.next_attempt_at - now())::float8
    END AS due_in_seconds,
    outbox.attempts,
    outbox.refusals,
    outbox.last_error,
    EXISTS (
        SELECT
        FROM outbox AS later
        WHERE later.aggregate_id = outbox.aggregate_id AND later.sequence > outbox.sequence
          AND CASE selected.state
              WHEN 'waiting' THEN later.published_at IS NULL AND later.failed_at IS NULL
              ELSE later.published_at IS NOT NULL
          END
    ) AS is_followed
FROM selected
JOIN outbox USING (id)
ORDER BY selected.since, outbox.id
