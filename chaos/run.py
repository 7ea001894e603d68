#!/usr/bin/env python3
"""`chaos/run.py SCENARIO --seconds N --seed S --check`: break a cluster of its own, and judge what its clients saw.

Exit codes: 0 no anomaly, 1 anomalies (or, with --strict, a missed target), 2 usage, 130 interrupted.

A run: start five brokers, load them, inject faults until the time is over or there were enough (`--faults`), heal, stop
the load, read everything twice, stop the brokers, compare the replicas, check the history. The seed decides faults,
victims and times; threads and processes are as they are, so a seed gives a similar run and not the same one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a script
    sys.path[0] = str(ROOT)

from chaos import disk, report, scenario, workload  # noqa: E402
from chaos.checker import Rules, Verdict, check  # noqa: E402
from chaos.cluster import Cluster, Layout, NotHealed, cluster_in  # noqa: E402
from chaos.faults import HARNESS, Faults, Hit, Plan, Window, is_fault  # noqa: E402
from chaos.group_checker import check_group  # noqa: E402
from chaos.history import OK, Recorder, read_file  # noqa: E402
from chaos.members import Members, history  # noqa: E402
from chaos.report import Injected  # noqa: E402
from chaos.scenario import Scenario, Step  # noqa: E402

Say = Callable[[str], None]

SECONDS = 60.0
SECONDS_MAX = 86_400.0
LOAD_S = 2.0  # of load before the first fault
CALM_AFTER_S = 0.5  # of that: what clients do at their beginning is not counted as calm
HEAL_S_MAX = 90.0
OFFLINE_S = 3.0  # in which a partition that must not have a leader is given time to get one


class Run:
    """One run of one scenario."""

    def __init__(
        self,
        name: str,
        spec: Scenario,
        seed: int,
        seconds: float,
        folder: Path,
        say: Say,
        repetitions_max: int | None = None,
    ) -> None:
        self.name, self.spec, self.seed, self.seconds = name, spec, seed, seconds
        self.folder = folder
        self.history = folder / "history.jsonl"
        self.injected: list[Injected] = []
        self.problems: dict[str, list[str]] = {"CRASH": [], "NOT-HEALED": [], "CLIENT": [], "UNCLEAN-LEADER": []}
        self.errors: dict[str, int] = {}
        self.measures: dict[str, float] = {}
        self._repetitions_max = repetitions_max
        self._windows: list[Window] = []
        self._say = say
        self._rng = random.Random(seed)
        self._members: Members | None = None
        self._topics: list[str] = [topic for topic in ("w1", "w4") if topic in spec.workloads]
        if unknown := [step.fault for step in spec.steps if not is_fault(step.fault)]:
            raise scenario.ScenarioError(f"{name}: no fault is called {unknown[0]!r}")

    def run(self) -> None:
        spec = self.spec
        layout = Layout(
            proxied=spec.proxied,
            clients_proxied=spec.clients_proxied,
            clocks=spec.clocks,
            tmpfs_mib=spec.tmpfs_mib,
            raft_tmpfs_mib=spec.raft_tmpfs_mib,
        )
        with (
            Recorder(self.history) as recorder,
            cluster_in(self.folder / "cluster", spec.settings, layout) as cluster,
        ):
            for topic in self._topics:
                cluster.create_topic(topic, spec.partitions, spec.replication)
            cluster.await_whole(self._topics)
            plan = Plan(self._topics, self.seconds, spec.loses_unsynced, spec.fsync_delay_ms)
            faults = Faults(cluster, recorder, self._rng, plan)
            load = self._load(recorder, cluster)
            began = time.monotonic()
            try:
                if spec.members:
                    self._gather(recorder, cluster, faults)
                    began = time.monotonic()
                self._break(recorder, faults)
                self.seconds = time.monotonic() - began
                self._heal(cluster, faults)
                load.stop()
                if self._members is not None:
                    self._members.drain()
                self._read(recorder, cluster)
                self._dump_replicas(recorder, cluster)
            except NotHealed as error:
                self._problem("NOT-HEALED", str(error))
            except RuntimeError as error:
                self._problem("CLIENT", str(error))
            finally:
                faults.end_children()
                if self._members is not None:
                    self._members.close()
            self.errors = dict(load.errors)
            self._windows += faults.windows
            self.measures |= faults.measures
            for crash in cluster.crashes:
                self._problem("CRASH", crash)

    def _gather(self, recorder: Recorder, cluster: Cluster, faults: Faults) -> None:
        self._members = faults.members = Members(self.folder / "members", recorder, cluster, self._topics[0])
        for _ in range(self.spec.members):
            self._members.join()
        self._members.await_shared(self.spec.partitions)

    def _problem(self, name: str, text: str) -> None:
        self.problems[name].append(text)
        self._say(f"{name}: {text}")

    def _load(self, recorder: Recorder, cluster: Cluster) -> workload.Workload:
        spec = self.spec
        load = workload.Workload(recorder, cluster.bootstrap, spec.delivery_timeout_ms)
        p = 0
        for topic, acks in (("w1", "all"), ("w4", "1")):
            if topic not in self._topics:
                continue
            share = max(1, spec.per_second // (spec.producers * len(self._topics)))
            for n in range(spec.producers):
                load.add_producer(workload.PRODUCER + p + n, topic, spec.partitions, share, acks)
            for n in range(spec.consumers):
                load.add_consumer(workload.CONSUMER + p + n, topic, spec.partitions)
            load.add_sampler(workload.SAMPLER + p, topic, spec.partitions)
            p += 10
        if "w5" in spec.workloads:
            load.add_churn(workload.CHURN)
        load.start()
        return load

    # -- phases ----------------------------------------------------------------------------------------------------

    def _break(self, recorder: Recorder, faults: Faults) -> None:
        until = time.monotonic() + self.seconds
        calm_since = recorder.now() + CALM_AFTER_S
        time.sleep(LOAD_S)
        for nth in itertools.count():
            if time.monotonic() >= until or self._is_enough():
                return
            acked, began = recorder.acked, recorder.now()
            self._note_window(True, calm_since, began)
            steps = self._choose(nth)
            self._inject(recorder, faults, steps)
            if self.spec.accepts_loss:
                self._check_offline(faults.cluster)
            ended = recorder.now()
            faults.cluster.await_whole(self._topics, HEAL_S_MAX)
            calm_since = recorder.add(HARNESS, OK, "whole")
            whole_s = calm_since - ended
            self.measures["whole_s"] = round(max(whole_s, self.measures.get("whole_s", 0.0)), 2)
            time.sleep(self._rng.uniform(*(steps[-1].rest_s or self.spec.rest_s)))
            texts = "; ".join(fault.text for fault in self.injected[-len(steps) :])
            self._say(
                f"{began:7.1f} s  {texts}; {ended - began:.1f} s, whole {whole_s:.1f} s later,"
                f" {recorder.acked - acked} records acknowledged"
            )

    def _is_enough(self) -> bool:
        return (
            self._repetitions_max is not None
            and sum(fault.repetitions for fault in self.injected) >= self._repetitions_max
        )

    def _inject(self, recorder: Recorder, faults: Faults, steps: list[Step]) -> None:
        """The second of a pair begins when the first has lasted its time; then they are taken back in that order."""
        begun: list[tuple[Hit, float]] = []
        for step in steps:
            began = recorder.now()
            begun.append((getattr(faults, step.fault)(**step.arguments), began))
            time.sleep(self._rng.uniform(*step.hold_s))
        for hit, began in begun:
            self._note_window(False, began + (self.spec.settle_s or 0.0), recorder.now(), hit.keys)
            hit.undo()
            ended = recorder.add(HARNESS, OK, "fault", x=hit.text)
            self.injected.append(Injected(hit.text, began, ended, hit.repetitions))

    def _note_window(self, calm: bool, begin_s: float, end_s: float, keys: Iterable[str] = ()) -> None:
        if self.spec.settle_s is not None and begin_s < end_s:
            self._windows.append(Window(calm, begin_s, end_s, frozenset(keys)))

    def _check_offline(self, cluster: Cluster) -> None:
        cluster.await_whole([], HEAL_S_MAX)
        time.sleep(OFFLINE_S)
        for topic in self._topics:
            partitions = cluster.describe(topic).partitions
            for partition in partitions:
                if partition.leader >= 0:
                    name = workload.key(topic, partition.partition)
                    self._problem("UNCLEAN-LEADER", f"{name} is led by {partition.leader}")
            self._say(f"{topic}: {sum(p.leader < 0 for p in partitions)} of {len(partitions)} partitions are offline")
            cluster.accept_loss(topic)

    def _choose(self, nth: int) -> list[Step]:
        """One step, or two that may last at the same time."""
        steps = self.spec.steps
        if self.spec.order == "cycle":
            return [steps[nth % len(steps)]]
        chosen = self._rng.choices(steps, [step.weight for step in steps])
        if chosen[0].pairs and self._rng.random() < self.spec.pair_share:
            others = [step for step in steps if step.pairs]
            chosen += self._rng.choices(others, [step.weight for step in others])
        return chosen

    def _heal(self, cluster: Cluster, faults: Faults) -> None:
        faults.heal()
        cluster.await_whole(self._topics, HEAL_S_MAX)

    def _read(self, recorder: Recorder, cluster: Cluster) -> None:
        for n, topic in enumerate(self._topics):
            for reader in range(2):
                workload.final_read(
                    recorder, cluster.bootstrap, topic, self.spec.partitions, workload.FINAL + 10 * n + reader
                )
        if "w5" in self.spec.workloads:
            cluster.ask(lambda: workload.final_topics(recorder, cluster.admin))

    def _dump_replicas(self, recorder: Recorder, cluster: Cluster) -> None:
        cluster.await_whole(self._topics, HEAL_S_MAX)
        described = [cluster.describe(topic) for topic in self._topics]
        cluster.stop(*range(cluster.brokers))
        for topic in described:
            for partition in topic.partitions:
                name = workload.key(topic.name, partition.partition)
                for broker in partition.isr:
                    found = disk.dump(cluster.folder(broker), topic.topic_id, partition.partition)
                    start, end, row = found if found is not None else (0, 0, [])
                    recorder.add(broker, OK, "replica", k=name, o=start, end=end, rows=[(name, row)])

    # -- verdict ---------------------------------------------------------------------------------------------------

    def report(self, *, judged: bool) -> report.Report:
        verdict = check(read_file(self.history), Rules(lag_s_max=self.spec.lag_s_max)) if judged else Verdict()
        line = report.timeline(read_file(self.history), self.injected)
        more = {name: len(texts) for name, texts in self.problems.items()}
        if judged and self._members is not None:
            group = check_group(history(self.history, self.folder / "members"), self.spec.partitions)
            verdict.anomalies += group.anomalies
            verdict.counts |= group.counts
            self.measures |= group.measures
        measures = self.measures | report.latency_ratio(read_file(self.history), self._windows)
        return report.make(self.spec, self.name, self.seed, self.seconds, verdict, more, self.errors, line, measures)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos/run.py", description="Break a cluster and judge what clients saw.")
    parser.add_argument("scenario", help=f"one of {', '.join(scenario.names())}, or a file")
    parser.add_argument("--seconds", type=float, default=None, help=f"how long faults are injected ({SECONDS:g})")
    parser.add_argument(
        "--faults", type=int, default=None, metavar="N", help="end after so many, however long it takes"
    )
    parser.add_argument("--seed", type=int, default=None, help="default: chosen, and printed")
    parser.add_argument("--check", action="store_true", help="check the history; any anomaly is exit code 1")
    parser.add_argument("--strict", action="store_true", help="a missed time target is exit code 1 as well")
    parser.add_argument("--keep", action="store_true", help="keep history, logs and data, also of a good run")
    parser.add_argument("--folder", type=Path, default=None, help="where the run lives; default: a temporary folder")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = SECONDS if options.faults is None else SECONDS_MAX
    if not 0 < options.seconds <= SECONDS_MAX or (options.faults is not None and options.faults < 1):
        parser.error("--seconds or --faults is out of range")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    # Resolved: the ledger names files by where they really are.
    folder = Path(tempfile.mkdtemp(prefix="zmqueue-chaos-", dir=options.folder)).resolve()
    try:
        spec = scenario.load(options.scenario)
        run = Run(Path(options.scenario).stem, spec, seed, options.seconds, folder, _say, options.faults)
    except scenario.ScenarioError as error:
        folder.rmdir()
        parser.error(str(error))
    for number in (signal.SIGINT, signal.SIGTERM):  # shells start background jobs with SIGINT ignored
        signal.signal(number, _interrupt)
    keep = True
    try:
        _say(f"{run.name}, seed {seed}, in {folder}: {run.spec.about}")
        run.run()
        result = run.report(judged=options.check)
        (folder / "timeline.svg").write_text(report.as_svg(result))
        (folder / "report.json").write_text(json.dumps(report.as_json(result), indent=2) + "\n")
        print(json.dumps(report.as_json(result)) if options.output == "json" else report.as_text(result))
        failed = not result.ok or (options.strict and not result.on_time)
        keep = options.keep or not result.ok
        return 1 if failed else 0
    except KeyboardInterrupt:
        _say("interrupted")
        keep = options.keep
        return 130
    finally:
        if keep:
            _say(f"kept in {folder}: history.jsonl, report.json, timeline.svg, cluster/broker-N.log")
        else:
            shutil.rmtree(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
