-- Leases due events as claim_events.sql does, and of each aggregate only the one that is next: while an event is not
-- published, no later one of its aggregate is claimed, by whichever relay. A parked event holds its followers up when
-- `parked_blocks` is true, and is passed over when it is false.
--
-- An event is sent only after its forerunner has been marked, so it takes a sweep of its own. Uses the partial index
-- outbox_due, and for each row that it finds there the index of outbox_places_are_taken_once. Locks as claim_events.sql.
--
-- The forerunners are looked through from the latest on, which NOT EXISTS would not promise: of an aggregate's backlog all
-- but the first event meet one that waits at once. From the earliest on, each would read the aggregate's whole history.
-- Written as a condition and not as IS NULL, which the planner takes for rare: it would then read the whole backlog first.
WITH due AS (
    SELECT id, next_attempt_at
    FROM outbox AS next
    WHERE published_at IS NULL AND failed_at IS NULL AND next_attempt_at <= now()
      AND COALESCE(
          (
              SELECT false
              FROM outbox AS earlier
              WHERE earlier.aggregate_id = next.aggregate_id
                AND earlier.sequence < next.sequence
                AND earlier.published_at IS NULL
                AND (earlier.failed_at IS NULL OR %(parked_blocks)s)
              ORDER BY earlier.sequence DESC
              LIMIT 1
          ),
          true
      )
    ORDER BY next_attempt_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
\ir parts/lease_events.sql
