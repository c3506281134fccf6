-- The events that an operator selects, those first that came into their state first.
--
-- Run it unprepared: each condition that is not asked for then disappears before the statement is planned, and so do the
-- states. What is left uses, as the selection has it, the primary key, the index of outbox_places_are_taken_once, or the
-- state's own: outbox_due, outbox_failed, outbox_published.
--
-- Locks and writes nothing.
WITH
\ir parts/select_events.sql
page AS (
    SELECT id, state, since
    FROM selected
    ORDER BY since, id
    LIMIT %(limit)s
)
SELECT
    outbox.id,
    outbox.event_type,
    outbox.aggregate_id,
    outbox.sequence,
    page.state,
    EXTRACT(EPOCH FROM now() - page.since)::float8 AS seconds_in_state,
    EXTRACT(EPOCH FROM now() - outbox.created_at)::float8 AS age_seconds,
    CASE
        WHEN page.state = 'waiting' THEN EXTRACT(EPOCH FROM outbox.next_attempt_at - now())::float8
    END AS due_in_seconds,
    outbox.attempts,
    outbox.refusals,
    outbox.last_error,
    EXISTS (
        SELECT
        FROM outbox AS later
        WHERE later.aggregate_id = outbox.aggregate_id AND later.sequence > outbox.sequence
          AND CASE page.state
              WHEN 'waiting' THEN later.published_at IS NULL AND later.failed_at IS NULL
              ELSE later.published_at IS NOT NULL
          END
    ) AS is_followed
FROM page
JOIN outbox USING (id)
ORDER BY page.since, outbox.id
