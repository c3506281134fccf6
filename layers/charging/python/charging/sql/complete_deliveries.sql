-- Writes down what became of claimed deliveries, each with its attempt, and returns those that were this claim's to
-- complete. `attempts` is the fencing number: where another dispatcher has claimed the row since, nothing matches.
--
--   SENT       the receiver answered 2xx
--   REFUSED    any other answer, or none: due again later, held against it
--   FAILED     the last of those: given up, and kept
--   POSTPONED  the receiver asks to wait, or has gone: due again as soon as its endpoint is, nothing held against it
--
-- May be run twice: what the first run completed under this number is not completed again, and is returned as not new.
-- Of a delivery's attempts the last twenty are kept.
--
-- Finds the rows by primary key and locks them until the transaction's end. The status is asked for by CASE, since a
-- plain comparison would offer outbox_deliveries_open as a way to the rows: see complete_events.sql.
WITH result AS (
    SELECT endpoint_id, event_id, attempt, outcome, delay_seconds, duration_ms, status, error, excerpt
    FROM unnest(
        %(endpoint_ids)s::uuid[], %(event_ids)s::uuid[], %(attempts)s::int[], %(outcomes)s::text[],
        %(delays)s::float8[], %(durations)s::int[], %(statuses)s::smallint[], %(errors)s::text[], %(excerpts)s::text[]
    ) AS result (endpoint_id, event_id, attempt, outcome, delay_seconds, duration_ms, status, error, excerpt)
),
completed_before AS (
    SELECT outbox_deliveries.endpoint_id, outbox_deliveries.event_id
    FROM outbox_deliveries
    JOIN result USING (endpoint_id, event_id)
    WHERE outbox_deliveries.attempts = result.attempt AND outbox_deliveries.status <> 'CLAIMED'
),
completed AS (
    UPDATE outbox_deliveries
    SET status = CASE WHEN outcome IN ('SENT', 'FAILED') THEN outcome ELSE 'RETRY' END,
        failures = failures + CASE WHEN outcome IN ('REFUSED', 'FAILED') THEN 1 ELSE 0 END,
        next_attempt_at = now() + make_interval(secs => delay_seconds),
        last_error = CASE WHEN outcome <> 'SENT' THEN COALESCE(result.error, 'The receiver answered ' || result.status) END,
        sent_at = CASE WHEN outcome = 'SENT' THEN now() END,
        failed_at = CASE WHEN outcome = 'FAILED' THEN now() END
    FROM result
    WHERE outbox_deliveries.endpoint_id = result.endpoint_id
      AND outbox_deliveries.event_id = result.event_id
      AND outbox_deliveries.attempts = result.attempt
      AND CASE outbox_deliveries.status WHEN 'CLAIMED' THEN true END
    RETURNING outbox_deliveries.endpoint_id, outbox_deliveries.event_id
),
noted AS (
    INSERT INTO delivery_attempts (endpoint_id, event_id, attempt, duration_ms, status, error, excerpt)
    SELECT endpoint_id, event_id, attempt, duration_ms, status, error, excerpt
    FROM result
    JOIN completed USING (endpoint_id, event_id)
),
forgotten AS (
    DELETE FROM delivery_attempts
    USING result
    WHERE delivery_attempts.endpoint_id = result.endpoint_id
      AND delivery_attempts.event_id = result.event_id
      AND delivery_attempts.attempt <= result.attempt - 20
)
SELECT endpoint_id, event_id, true AS is_new FROM completed
UNION ALL
SELECT endpoint_id, event_id, false AS is_new FROM completed_before
