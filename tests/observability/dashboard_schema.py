"""What a dashboard of ours may hold, key by key: Grafana itself ignores what it does not know, so that a typo shows
nothing."""

from __future__ import annotations

from typing import Any

TEXT, FLAG, COUNT, NUMBER = (
    {"type": "string"},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0},
    {"type": "number"},
)
WORDS = {"type": "string", "minLength": 1}


def record(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these keys and no others."""
    known = {**required, **(optional or {})}
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


def listed(items: dict[str, Any], least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


DATASOURCE = record({"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}})
EMPTY = {"type": "array", "maxItems": 0}
LEGEND = record(
    {"displayMode": {"enum": ["list", "table"]}, "placement": {"enum": ["bottom", "right"]}, "showLegend": FLAG}
)
TOOLTIP = record({"mode": {"enum": ["single", "multi"]}, "sort": {"enum": ["none", "asc", "desc"]}})
THRESHOLDS = record(
    {
        "mode": {"const": "absolute"},
        "steps": listed(record({"color": {"enum": ["green", "orange", "red"]}, "value": {"type": ["number", "null"]}})),
    }
)
STATE = record({"text": WORDS, "color": WORDS, "index": COUNT})
MAPPING = record(
    {
        "type": {"const": "value"},
        "options": {"type": "object", "patternProperties": {"^[0-9]$": STATE}, "additionalProperties": False},
    }
)
CUSTOM = record(
    {},
    {
        "lineWidth": COUNT,
        "fillOpacity": {"type": "integer", "minimum": 0, "maximum": 100},
        "showPoints": {"const": "never"},
        "spanNulls": FLAG,
        "thresholdsStyle": record({"mode": {"const": "dashed"}}),
        "stacking": record({"mode": {"const": "normal"}, "group": TEXT}),
        "scaleDistribution": record({"type": {"const": "linear"}}),
    },
)
DEFAULTS = record(
    {"unit": WORDS, "thresholds": THRESHOLDS},
    {"decimals": COUNT, "min": NUMBER, "max": NUMBER, "noValue": WORDS, "mappings": listed(MAPPING), "custom": CUSTOM},
)
OPTIONS = {
    "timeseries": record({"legend": LEGEND, "tooltip": TOOLTIP}),
    "stat": record(
        {
            "colorMode": {"const": "value"},
            "graphMode": {"enum": ["area", "none"]},
            "textMode": {"const": "value"},
            "reduceOptions": record({"calcs": {"const": ["lastNotNull"]}, "fields": TEXT, "values": FLAG}),
        }
    ),
    "heatmap": record(
        {
            "calculate": {"const": False},
            "cellGap": COUNT,
            "cellValues": record({"unit": WORDS}),
            "color": record(
                {
                    "mode": {"const": "scheme"},
                    "scheme": WORDS,
                    "steps": COUNT,
                    "reverse": FLAG,
                    "fill": WORDS,
                    "exponent": NUMBER,
                    "scale": {"const": "exponential"},
                }
            ),
            "filterValues": record({"le": NUMBER}),
            "rowsFrame": record({"layout": {"const": "auto"}}),
            "yAxis": record({"axisPlacement": WORDS, "axisLabel": WORDS, "reverse": FLAG}),
            "legend": record({"show": FLAG}),
            "tooltip": record({"mode": WORDS, "yHistogram": FLAG, "showColorScale": FLAG}),
        }
    ),
    "state-timeline": record(
        {
            "mergeValues": FLAG,
            "showValue": {"const": "auto"},
            "alignValue": {"const": "left"},
            "rowHeight": NUMBER,
            "legend": LEGEND,
            "tooltip": TOOLTIP,
        }
    ),
}
PLACE = record({"x": COUNT, "y": COUNT, "w": {"type": "integer", "minimum": 1}, "h": {"type": "integer", "minimum": 1}})


def _panel(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    heat = {"format": {"const": "heatmap"}} if kind == "heatmap" else {}
    target = {"refId": {"pattern": "^[A-Z]$"}, "datasource": DATASOURCE, "expr": WORDS, "legendFormat": WORDS, **heat}
    return record(
        {
            "id": COUNT,
            "type": {"const": kind},
            "title": WORDS,
            "description": WORDS,
            "datasource": DATASOURCE,
            "gridPos": PLACE,
            "fieldConfig": record({"defaults": DEFAULTS, "overrides": EMPTY}),
            "options": options,
            "targets": listed(record(target)),
        }
    )


ROW = record(
    {"id": COUNT, "type": {"const": "row"}, "title": WORDS, "collapsed": FLAG, "gridPos": PLACE, "panels": EMPTY}
)
COMMON = {"name": WORDS, "label": WORDS, "refresh": COUNT, "options": EMPTY, "regex": TEXT, "hide": COUNT}
COMMON |= {"multi": FLAG, "includeAll": FLAG}
QUERY_VARIABLE = record(
    {
        **COMMON,
        "type": {"const": "query"},
        "datasource": DATASOURCE,
        "definition": WORDS,
        "query": record({"query": WORDS, "refId": WORDS}),
        "sort": COUNT,
        "current": record({"text": listed(WORDS), "value": listed(WORDS)}),
    }
)
SOURCE_VARIABLE = record(
    {**COMMON, "type": {"const": "datasource"}, "query": {"const": "prometheus"}, "current": record({})}
)
DASHBOARD = record(
    {
        "uid": {"pattern": "^[a-z-]{1,40}$"},
        "title": WORDS,
        "description": WORDS,
        "tags": listed(WORDS),
        "schemaVersion": {"const": 42},
        "version": COUNT,
        "editable": FLAG,
        "graphTooltip": {"enum": [0, 1, 2]},
        "timezone": {"const": "browser"},
        "refresh": {"pattern": "^[0-9]+[sm]$"},
        "time": record({"from": WORDS, "to": {"const": "now"}}),
        "fiscalYearStartMonth": COUNT,
        "links": EMPTY,
        "annotations": record({"list": EMPTY}),
        "templating": record({"list": listed({"oneOf": [QUERY_VARIABLE, SOURCE_VARIABLE]})}),
        "panels": listed({"oneOf": [ROW, *(_panel(kind, options) for kind, options in OPTIONS.items())]}),
    }
)
