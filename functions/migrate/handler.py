"""Brings the database's schema forward; invoked by a deployment or by an operator: wiring only."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import database, errors, migrations, telemetry
from charging.settings import DatabaseSettings


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Applies the migrations that are missing and returns their names. Raises, and so fails, when one cannot be."""
    with database.connect(DatabaseSettings.from_environment()) as connection:
        applied = migrations.migrate(connection, schema())
    telemetry.logger("migrate").info("migrated", applied=applied)
    return {"applied": applied}


def schema() -> Path:
    """The folder with the migrations: a layer brings it, and it is found as a package is."""
    found = find_spec("schema")
    if found is None or not found.submodule_search_locations:
        raise errors.Misconfigured("There is no folder `schema` beside the function's packages: its layer is missing.")
    return Path(next(iter(found.submodule_search_locations)))
