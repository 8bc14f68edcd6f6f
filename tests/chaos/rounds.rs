//! One cluster from its start to the judgement: rounds of kills at random moments.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use pushpull::blocking::Reader;
use pushpull::{TaskId, WorkerConfig};

use crate::chance::Chance;
use crate::daemons::{Daemons, Transport};
use crate::history::History;
use crate::ledger::{Verdict, judge};
use crate::report::Report;
use crate::setting::{SHARDS, Setting, WORKERS};
use crate::workers::Workers;

/// What one cluster is like, and what is done to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) tasks: usize,
    pub(crate) transport: Transport,
    /// Whether steps are synchronous. Then a worker is killed in each round, in turns the chief.
    pub(crate) synchronous: bool,
    /// How many servers are killed.
    pub(crate) kills: u64,
    /// In how many rounds, if no server is killed, a worker is.
    pub(crate) worker_rounds: u64,
}

/// One round in so many kills a worker as well.
const WORKER_KILL_EVERY: u64 = 5;

/// One round in so many does not wait for the training to have gone on.
const HASTY_EVERY: u64 = 8;

/// One restart in so many is killed before it has answered.
const STILLBORN_EVERY: u64 = 10;

/// One round in so many takes the moment as it is drawn. The others wait on for a push to be under
/// way, if none is: a server that dies while nobody wants anything has nothing to lose.
const UNAIMED_EVERY: u64 = 16;

/// A kill comes so late, at most, after the training was seen to go on.
const PAUSE_US_MAX: u64 = 40_000;

/// A server that is killed before it answers lives so long, at most.
const STILLBORN_US_MAX: u64 = 8_000;

/// Runs the plan below a folder of its own.
pub(crate) fn run(plan: &Plan, folder: &Path, chance: &mut Chance) -> Report {
    let folder = folder.join(plan.name);
    fs::create_dir(&folder).expect("a folder for the cluster");
    let hosts = plan.transport.addresses(&folder, plan.tasks, chance);
    let setting = Setting { hosts, chunks: chunks(plan), synchronous: plan.synchronous, folder };
    let mut rounds = Rounds {
        daemons: Daemons::start(&setting),
        workers: Workers::start(&setting),
        report: Report::default(),
        chance,
    };
    // What is killed is a training; that servers die before there are variables is another test.
    rounds.workers.await_all();
    let since = Instant::now();
    rounds.kill_servers(plan);
    rounds.kill_workers(plan.worker_rounds);
    let seconds = since.elapsed().as_secs_f64();
    let Rounds { mut daemons, workers, mut report, .. } = rounds;
    let histories = workers.finish();
    daemons.await_memory_back();
    report.acknowledged = histories.iter().map(|history| history.acknowledged).sum();
    report.stale = histories.iter().map(|history| history.stale).sum();
    let invoked: u64 = histories.iter().map(|history| history.invoked).sum();
    report.unknown = invoked - report.acknowledged - report.stale;
    report.verdict = judge_now_and_later(plan, &setting, &mut daemons, &histories);
    println!(
        "{}: {} servers, {} workers and {} chiefs killed in {seconds:.1} s, {} pushes \
         acknowledged, {} unknown, {} stale",
        plan.name,
        report.kills,
        report.worker_kills - report.chief_kills,
        report.chief_kills,
        report.acknowledged,
        report.unknown,
        report.stale
    );
    report
}

/// Ledgers for so many pushes that hardly two meet at one element in a run of the usual length.
fn chunks(plan: &Plan) -> u64 {
    (4 + (plan.kills + plan.worker_rounds) / 25).min(40)
}

/// A cluster, and what has been done to it so far.
struct Rounds<'a> {
    daemons: Daemons,
    workers: Workers,
    report: Report,
    chance: &'a mut Chance,
}

impl Rounds<'_> {
    fn kill_servers(&mut self, plan: &Plan) {
        let (kills, mut round) = (plan.kills, 0);
        while self.report.kills < kills {
            round += 1;
            if !self.chance.once_in(UNAIMED_EVERY) {
                self.workers.await_open_push();
            }
            let victims = self.victims();
            victims.iter().for_each(|&task| self.daemons.kill(task));
            self.count(victims.len() as u64);
            let other = 1 + self.chance.below(u64::from(WORKERS) - 1) as usize;
            match plan.synchronous {
                true => self.kill_worker(if round % 2 == 0 { 0 } else { other }),
                false if round % WORKER_KILL_EVERY == 0 => self.kill_a_worker(),
                false => {}
            }
            victims.into_iter().for_each(|task| self.revive(task));
            let hasty = self.chance.once_in(HASTY_EVERY) && self.report.kills < kills;
            if !hasty {
                self.await_progress();
            }
            self.pause(PAUSE_US_MAX);
        }
    }

    fn kill_workers(&mut self, rounds: u64) {
        for _ in 0..rounds {
            self.kill_a_worker();
            self.await_progress();
            self.pause(PAUSE_US_MAX);
        }
    }

    /// Mostly one server, at times all of them.
    fn victims(&mut self) -> Vec<usize> {
        let tasks = self.daemons.tasks();
        match self.chance.once_in(6) {
            true => (0..tasks).collect(),
            false => vec![self.chance.below(tasks as u64) as usize],
        }
    }

    /// Counts servers that are dead now, and whether a push was under way: what is open while a
    /// server is dead was open when it died.
    fn count(&mut self, kills: u64) {
        self.report.kills += kills;
        if self.workers.have_open_pushes() {
            self.report.in_flight += kills;
        }
    }

    /// Starts a server on its state until it answers; at times it is killed again before that.
    fn revive(&mut self, task: usize) {
        loop {
            let since = self.daemons.restart(task);
            if !self.chance.once_in(STILLBORN_EVERY) {
                let recovery = self.daemons.await_answers(task, since);
                return self.report.recoveries.push(recovery);
            }
            self.pause(STILLBORN_US_MAX);
            self.daemons.kill(task);
            self.count(1);
        }
    }

    fn kill_a_worker(&mut self) {
        let worker = self.chance.below(WORKERS.into()) as usize;
        self.kill_worker(worker);
    }

    fn kill_worker(&mut self, worker: usize) {
        self.workers.kill_and_restart(worker);
        self.report.worker_kills += 1;
        self.report.chief_kills += u64::from(worker == 0);
    }

    fn await_progress(&mut self) {
        self.daemons.assert_alive();
        let before = self.workers.acknowledged();
        self.workers.await_more_than(before);
    }

    /// Not a wait for anything: the moment of the next kill is what is drawn.
    fn pause(&mut self, us_max: u64) {
        std::thread::sleep(Duration::from_micros(self.chance.below(us_max)));
    }
}

/// Judges what there is, and again after one more kill, in peace, and after a restart of the
/// orderly kind if servers keep their state through one.
fn judge_now_and_later(
    plan: &Plan,
    setting: &Setting,
    daemons: &mut Daemons,
    histories: &[History],
) -> Verdict {
    let mut verdict = read_and_judge(setting, histories);
    let tasks = 0..daemons.tasks();
    if plan.kills > 0 {
        tasks.clone().for_each(|task| daemons.kill(task));
        restart_all(daemons);
        verdict.add(read_and_judge(setting, histories));
    }
    daemons.stop();
    if plan.kills > 0 && daemons.have_states() {
        restart_all(daemons);
        verdict.add(read_and_judge(setting, histories));
        daemons.stop();
    }
    verdict
}

fn restart_all(daemons: &mut Daemons) {
    let started: Vec<_> = (0..daemons.tasks()).map(|task| daemons.restart(task)).collect();
    for (task, since) in started.into_iter().enumerate() {
        daemons.await_answers(task, since);
    }
}

fn read_and_judge(setting: &Setting, histories: &[History]) -> Verdict {
    let config = WorkerConfig::new(setting.cluster(), TaskId::worker(WORKERS));
    let mut reader = Reader::connect(config).expect("a reader connects to servers that are up");
    let mut params = reader.params();
    reader.pull(&mut params).expect("servers that are up answer a pull");
    judge(setting, &params, &mut reader, histories)
        .expect("the variables are those that were declared")
}

// Two shards, in one task or in two.
const _: () = assert!(SHARDS == 2);
