-- Leases due deliveries, a few of each endpoint: charges the attempt and pushes the row past the lease. A row whose
-- lease has ended is due again by itself. Nothing is taken of an endpoint that is disabled, deleted, paused or open.
--
-- Steps from one endpoint with deliveries to be sent to the next, by outbox_deliveries_open, beginning after %(after)s,
-- and ends at its limit: what it reads does not grow with the number of deliveries, however many wait at one endpoint.
-- `share` is how many of an endpoint may be with this dispatcher at once, of which it has `busy` already.
--
-- Takes of slow endpoints or of the others, as `slow` says. An endpoint is slow when the last attempt at the youngest event
-- that was tried there took longer than `slow_seconds`: one row, at the end of the attempts' primary key.
--
-- Locks the rows that it takes until the statement's own commit, and skips rows that another dispatcher is taking at
-- this moment. Its limit is met by stopping there, and not by sorting all.
WITH RECURSIVE
\ir parts/step_through_endpoints.sql
due AS (
    SELECT
        delivery.endpoint_id, delivery.event_id,
        endpoint.url, endpoint.secret_version, endpoint.previous_signs, false AS is_probe
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT
            id, url, secret_version,
            COALESCE(previous_signs_until > now(), false) AS previous_signs,
            %(share)s::int - COALESCE(
                (
                    SELECT busy.deliveries
                    FROM unnest(%(busy_endpoints)s::uuid[], %(busy_deliveries)s::int[]) AS busy (endpoint_id, deliveries)
                    WHERE busy.endpoint_id = webhook_endpoints.id
                ),
                0
            ) AS room
        FROM webhook_endpoints
        WHERE id = waiting.endpoint_id AND id <> %(after)s
          AND disabled_at IS NULL AND deleted_at IS NULL
          AND opened_at IS NULL AND (resumes_at IS NULL OR resumes_at <= now())
          AND %(slow)s = COALESCE(
              (
                  SELECT duration_ms > 1000 * %(slow_seconds)s::float8
                  FROM delivery_attempts
                  WHERE endpoint_id = webhook_endpoints.id
                  ORDER BY event_id DESC, attempt DESC
                  LIMIT 1
              ),
              false
          )
        LIMIT 1 -- looked up by its key for each step, and not joined with all
    ) AS endpoint
    CROSS JOIN LATERAL (
        SELECT outbox_deliveries.endpoint_id, outbox_deliveries.event_id
        FROM outbox_deliveries
        WHERE outbox_deliveries.endpoint_id = endpoint.id
          AND status IN ('PENDING', 'CLAIMED', 'RETRY') AND next_attempt_at <= now()
        ORDER BY next_attempt_at, outbox_deliveries.event_id
        LIMIT greatest(endpoint.room, 0)
        FOR UPDATE SKIP LOCKED
    ) AS delivery
    LIMIT %(limit)s
)
\ir parts/lease_deliveries.sql
