"""Metrics on Ray's own endpoint, scraped as Prometheus would."""

import time
import urllib.error
import urllib.request

from miles_disagg.observe.metrics import RayMetrics


def test_step_metrics_appear_on_rays_metrics_endpoint(local_ray):
    metrics = RayMetrics("run-scraped")
    metrics.log(0, {"perf/step_seconds": 1.5, "rollout/reward_mean": 0.25})
    node = local_ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline, lines = time.monotonic() + 60, []
    while time.monotonic() < deadline and len(lines) < 2:
        time.sleep(1)
        try:
            text = urllib.request.urlopen(url, timeout=5).read().decode()
        except (urllib.error.URLError, TimeoutError):
            continue
        lines = [line for line in text.splitlines() if 'run_id="run-scraped"' in line]
    values = {line.partition("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert values == {"ray_miles_perf_step_seconds": 1.5, "ray_miles_rollout_reward_mean": 0.25}
