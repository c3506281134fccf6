-- Writes down what became of claimed events, and returns the ids that were this claim's to complete.
-- `attempts` is the fencing number: where another relay has claimed the row since, nothing matches.
--
--   PUBLISHED  the broker accepted it
--   REFUSED    the broker refused this very event: due again later, the refusal counted
--   FAILED     parked with its error until an operator decides
--   POSTPONED  the broker could not be reached or was overloaded: due again later, nothing held against it
--   RETURNED   not sent, since the claim held more calls than fit into one sweep: due again at once
--
-- May be run twice: what the first run settled under this number is not settled again, and is returned again; and a
-- refusal is not counted twice, since the count is given.
-- The delay before the next attempt doubles from 1 second to 60 at most, so that events flow within a minute
-- of an outage's end, and is spread over its upper half, so that they do not all come back in one instant.
--
-- Finds the rows by primary key and locks them until the statement's own commit. Whether a row is settled is asked by
-- num_nonnulls, since IS NULL would offer the partial indexes as a way to the rows. Statistics that were taken while
-- nothing was due make outbox_due look empty; after an outage each completion then reads the whole backlog through it.
WITH result AS (
    SELECT id, attempts, outcome, refusals, error
    FROM unnest(
        %(ids)s::uuid[], %(attempts)s::int[], %(outcomes)s::text[], %(refusals)s::int[], %(errors)s::text[]
    ) AS result (id, attempts, outcome, refusals, error)
),
settled_before AS (
    SELECT outbox.id
    FROM outbox
    JOIN result USING (id, attempts)
    WHERE num_nonnulls(published_at, failed_at) > 0
),
completed AS (
    UPDATE outbox
    SET published_at = CASE WHEN outcome = 'PUBLISHED' THEN now() END,
        failed_at = CASE WHEN outcome = 'FAILED' THEN now() END,
        refusals = result.refusals,
        next_attempt_at = CASE
            WHEN outcome IN ('REFUSED', 'POSTPONED')
                THEN now() + make_interval(secs => least(60, 2 ^ least(outbox.attempts - 1, 6)) * (0.5 + random() / 2))
            ELSE now()
        END,
        last_error = CASE WHEN outcome = 'RETURNED' THEN last_error ELSE error END
    FROM result
    WHERE outbox.id = result.id
      AND outbox.attempts = result.attempts
      AND num_nonnulls(published_at, failed_at) = 0
    RETURNING outbox.id
)
SELECT id FROM settled_before UNION ALL SELECT id FROM completed
