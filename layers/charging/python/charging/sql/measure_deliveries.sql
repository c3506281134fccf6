-- For how many seconds the oldest delivery has been due that nothing holds back; 0 when none is. A delivery counts from
-- when it could be sent: those that wait for their next attempt, and those of an endpoint that is disabled, paused or
-- open, wait for the receiver and not for us. An endpoint that is enabled again, or whose breaker closes, begins anew.
--
-- And how many endpoints' breakers have opened since any receiver at all took a delivery. One is its receiver's outage; when
-- several fail and nobody takes anything any more, it may be our own way out that is gone, and no delivery has an age then.
--
-- Steps through all endpoints as the claim does (%(after)s is below every id), and reads one row of each. Looks the others up
-- by webhook_endpoints_open, and the last delivery that was taken by the end of outbox_deliveries_sent.
WITH RECURSIVE
\ir parts/step_through_endpoints.sql
oldest AS (
    SELECT greatest(
        resumes_at,
        (
            SELECT outbox_deliveries.next_attempt_at
            FROM outbox_deliveries
            WHERE outbox_deliveries.endpoint_id = waiting.endpoint_id AND status IN ('PENDING', 'CLAIMED', 'RETRY')
            ORDER BY outbox_deliveries.next_attempt_at
            LIMIT 1
        )
    ) AS due_at
    FROM waiting
    JOIN webhook_endpoints ON id = waiting.endpoint_id
    WHERE disabled_at IS NULL AND deleted_at IS NULL
      AND opened_at IS NULL AND (resumes_at IS NULL OR resumes_at <= now())
)
SELECT
    greatest(COALESCE(EXTRACT(EPOCH FROM now() - min(due_at)), 0), 0)::float8 AS oldest_age_seconds,
    (
        SELECT count(*)
        FROM webhook_endpoints
        WHERE opened_at > COALESCE((SELECT max(sent_at) FROM outbox_deliveries WHERE status = 'SENT'), '-infinity')
          AND disabled_at IS NULL AND deleted_at IS NULL
    ) AS lost_endpoints
FROM oldest
