-- Claims the key, new or expired, and stores the response under it that the step `admitted` has come to. `won` has one
-- row where that was done, and none where nothing was admitted, or where somebody has committed the key since.
taken_over AS (
    UPDATE idempotency_keys
    SET fingerprint = %(fingerprint)s,
        response_status = admitted.response_status,
        response_headers = admitted.response_headers,
        response_body = admitted.response_body,
        created_at = now(),
        expires_at = now() + make_interval(hours => %(retention_hours)s::int)
    FROM admitted
    WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
      AND expires_at <= now() AND status = 'COMPLETED'
    RETURNING idempotency_keys.response_status
),
claimed AS (
    INSERT INTO idempotency_keys (
        principal, endpoint, key, fingerprint, status,
        response_status, response_headers, response_body, expires_at
    )
    SELECT
        %(principal)s, %(endpoint)s, %(key)s, %(fingerprint)s, 'COMPLETED',
        response_status, response_headers, response_body,
        now() + make_interval(hours => %(retention_hours)s::int)
    FROM admitted
    WHERE NOT EXISTS (SELECT FROM taken_over)
    ON CONFLICT (principal, endpoint, key) DO NOTHING
    RETURNING response_status
),
won AS MATERIALIZED (
    SELECT response_status FROM taken_over UNION ALL SELECT response_status FROM claimed
),
