-- Leases one due delivery of each open endpoint whose next probe is due, and puts the one after it behind the lease: an
-- open endpoint has one delivery under way, whatever dispatchers there are.
--
-- Finds the endpoints by webhook_endpoints_open and their deliveries by outbox_deliveries_open. Locks both until the
-- statement's own commit, and skips what another dispatcher is taking at this moment.
WITH half_open AS (
    UPDATE webhook_endpoints
    SET resumes_at = now() + make_interval(secs => %(lease_seconds)s)
    FROM (
        SELECT id
        FROM webhook_endpoints
        WHERE opened_at IS NOT NULL AND resumes_at <= now()
          AND disabled_at IS NULL AND deleted_at IS NULL
          AND EXISTS (
              SELECT FROM outbox_deliveries
              WHERE endpoint_id = webhook_endpoints.id
                AND status IN ('PENDING', 'CLAIMED', 'RETRY') AND next_attempt_at <= now()
          )
        ORDER BY resumes_at
        LIMIT %(limit)s
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS ready
    WHERE webhook_endpoints.id = ready.id
    RETURNING
        webhook_endpoints.id, url, secret_version,
        COALESCE(previous_signs_until > now(), false) AS previous_signs
),
due AS (
    SELECT
        delivery.endpoint_id, delivery.event_id,
        half_open.url, half_open.secret_version, half_open.previous_signs, true AS is_probe
    FROM half_open
    CROSS JOIN LATERAL (
        SELECT outbox_deliveries.endpoint_id, outbox_deliveries.event_id
        FROM outbox_deliveries
        WHERE outbox_deliveries.endpoint_id = half_open.id
          AND status IN ('PENDING', 'CLAIMED', 'RETRY') AND next_attempt_at <= now()
        ORDER BY next_attempt_at, outbox_deliveries.event_id
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) AS delivery
)
\ir parts/lease_deliveries.sql
