from polylens.engine.requirements import check_requirements

check_requirements()
