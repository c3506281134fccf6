"""Brings the database's schema forward; invoked by a deployment or by an operator: wiring only."""

from pathlib import Path
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import database, migrations, telemetry
from charging.settings import MigrateSettings


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Applies the migrations that are missing and returns their names. Raises, and so fails, when one cannot be."""
    settings = MigrateSettings.from_environment()
    with database.connect(settings) as connection:
        applied = migrations.migrate(connection, Path(settings.schema_dir))
    telemetry.logger("migrate").info("migrated", applied=applied)
    return {"applied": applied}
