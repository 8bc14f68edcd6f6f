//! The run of one cluster: start, rounds of faults at random moments, judgement.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::error::Chain;
use pushpull::protocol::Refusal;
use pushpull::worker::Advice;

use crate::chance::Chance;
use crate::daemons::{DaemonTransport, Daemons};
use crate::damage;
use crate::first_save;
use crate::history::{Entry, History};
use crate::hostile::HostileClients;
use crate::ledger::{Found, LedgerVerdict, judge};
use crate::links::{Cut, Link, Links, Stall};
use crate::process::{POLL_INTERVAL, TIMEOUT};
use crate::report::ChaosReport;
use crate::setting::{ChaosSetting, LEASE, TOO_LONG, WORKERS};
use crate::workers::Workers;

/// The shape of one cluster and its faults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) tasks: usize,
    pub(crate) transport: DaemonTransport,
    /// Whether each pair of tasks has a link that can be cut. Leases and token timeouts are short
    /// then.
    pub(crate) has_links: bool,
    /// Whether hostile clients send valid messages with mutated numbers.
    pub(crate) is_attacked: bool,
    /// Whether steps are synchronous. A worker is killed with each server then, the chief every
    /// other time.
    pub(crate) synchronous: bool,
    pub(crate) counts: Counts,
    /// The number of worker kills after the rounds, if no server is killed.
    pub(crate) worker_rounds: u64,
    /// The minimum duration of the rounds.
    pub(crate) lasts: Duration,
}

/// The number of faults of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Servers that are killed.
    pub(crate) kills: u64,
    /// Workers and servers that are stopped for some time.
    pub(crate) stops: u64,
    pub(crate) cuts: u64,
    pub(crate) stalls: u64,
    pub(crate) disk_faults: u64,
    /// Damaged state files. Checkpoints are damaged by every other restore.
    pub(crate) damages: u64,
    pub(crate) restores: u64,
}

impl Counts {
    fn all(&self) -> [u64; 7] {
        let Counts { kills, stops, cuts, stalls, disk_faults, damages, restores } = *self;
        [kills, stops, cuts, stalls, disk_faults, damages, restores]
    }
}

/// One kill round in this many also kills a worker.
const WORKER_KILL_EVERY: u64 = 5;

/// One round in this many does not wait for progress before the next round.
const HASTY_EVERY: u64 = 8;

/// One restarted server in this many is killed before it answers.
const STILLBORN_EVERY: u64 = 10;

/// One kill in this many happens at once. The others wait until a push is in flight, since an idle
/// server has nothing to lose.
const UNAIMED_EVERY: u64 = 16;

/// The longest pause between progress of the training and the next fault.
const PAUSE_US_MAX: u64 = 40_000;

/// The longest pause where hostile clients connect: they need time to get push slots.
const ATTACKED_US_MAX: u64 = 600_000;

/// The longest life of a server that is killed before it answers.
const STILLBORN_US_MAX: u64 = 8_000;

/// The file size limit of a server whose disk is full.
const FULL_BYTES: u64 = 64 << 10;

/// Runs a plan in its own folder below `folder`.
pub(crate) fn run(plan: &Plan, folder: &Path, chance: &mut Chance) -> ChaosReport {
    let folder = folder.join(plan.name);
    fs::create_dir(&folder).expect("a folder for the cluster");
    let hosts = plan.transport.addresses(&folder, plan.tasks, chance);
    let links = plan.has_links.then(|| Arc::new(Links::start(&hosts, WORKERS as usize)));
    let synchronous = plan.synchronous;
    let expires = plan.has_links;
    let setting = ChaosSetting { hosts, chunks: chunks(plan), synchronous, expires, folder };
    let mut report = ChaosReport::default();
    let mut daemons = Daemons::start(&setting, links.clone());
    if plan.has_links && plan.counts.kills > 0 {
        let victim = chance.below(daemons.tasks() as u64) as usize;
        first_save::kill_during(&setting, &mut daemons, victim);
        report.other_kills += 1;
        report.first_saves += 1;
    }
    let mut rounds = ChaosRounds {
        daemons,
        workers: Workers::start(&setting, links.clone()),
        setting: setting.clone(),
        links,
        report,
        chance,
    };
    // Faults begin with the training. Other tests kill servers before there are variables.
    rounds.workers.await_all();
    let hostile = plan.is_attacked.then(|| HostileClients::start(&setting, rounds.chance));
    let since = Instant::now();
    rounds.all(plan);
    rounds.kill_workers(plan.worker_rounds);
    let seconds = since.elapsed().as_secs_f64();
    rounds.note_checkpoints();
    let ChaosRounds { mut daemons, workers, mut report, .. } = rounds;
    if let Some(hostile) = hostile {
        report.hostile = hostile.finish();
        report.hostile.assert_deep(plan.synchronous);
    }
    let (histories, given_up) = workers.finish();
    report.given_up = given_up;
    daemons.await_memory_released();
    report.slots_lost = daemons.slots_lost();
    report.acknowledged = histories.iter().map(|history| history.acknowledged).sum();
    report.stale = histories.iter().map(|history| history.stale).sum();
    report.refused = histories.iter().map(|history| history.refused).sum();
    let invoked: u64 = histories.iter().map(|history| history.invoked).sum();
    report.unknown = invoked - report.acknowledged - report.stale - report.refused;
    let (mut verdict, _) = read_and_judge(&setting, &histories, None);
    report.partly_applied = partly_applied(&setting);
    verdict.told(report.partly_applied);
    verdict.add(judge_later(plan, &setting, &mut daemons, &histories));
    report.verdict.add(verdict);
    report.panics = daemons.panics();
    println!("{}: {seconds:.1} s, {}", plan.name, report.summary());
    report
}

/// Returns the number of ledger variables per worker and shard: enough that in a run of the usual
/// length hardly any element gets two pushes.
fn chunks(plan: &Plan) -> u64 {
    if !plan.lasts.is_zero() {
        return CHUNKS_MAX;
    }
    (4 + (plan.counts.all().iter().sum::<u64>() + plan.worker_rounds) / 12).min(CHUNKS_MAX)
}

/// The maximum number of ledger variables per worker and shard.
const CHUNKS_MAX: u64 = 40;

/// A running cluster and the report of its faults.
struct ChaosRounds<'a> {
    setting: ChaosSetting,
    daemons: Daemons,
    workers: Workers,
    links: Option<Arc<Links>>,
    report: ChaosReport,
    chance: &'a mut Chance,
}

impl ChaosRounds<'_> {
    /// Injects all faults of the plan in random order.
    fn all(&mut self, plan: &Plan) {
        let since = Instant::now();
        let mut round = 0;
        loop {
            let done = self.report.counts().all();
            let mut left: Vec<u64> = plan
                .counts
                .all()
                .iter()
                .zip(done)
                .map(|(all, done)| all.saturating_sub(done))
                .collect();
            let is_over_counts = left.iter().all(|&left| left == 0);
            if is_over_counts && since.elapsed() < plan.lasts {
                left = plan.counts.all().to_vec();
            }
            let total: u64 = left.iter().sum();
            if total == 0 {
                return;
            }
            round += 1;
            let mut drawn = self.chance.below(total);
            let kind = left.iter().position(|&left| {
                let is_it = drawn < left;
                drawn = drawn.saturating_sub(left);
                is_it
            });
            match kind.expect("the drawn number is below the total") {
                0 => self.kill(plan, round),
                1 => self.stop(),
                2 => self.cut(),
                3 => self.stall(),
                4 => self.disk_fault(),
                5 => self.damage(),
                _ => self.restore(),
            }
            let hasty = self.chance.once_in(HASTY_EVERY) && total > 1 && !is_over_counts;
            if !hasty {
                self.await_progress();
            }
            self.pause(if plan.is_attacked { ATTACKED_US_MAX } else { PAUSE_US_MAX });
            self.note_checkpoints();
            self.report.panics = self.daemons.panics();
        }
    }

    /// Kills one server or all, sometimes with a worker, and restarts them.
    fn kill(&mut self, plan: &Plan, round: u64) {
        if !self.chance.once_in(UNAIMED_EVERY) {
            self.workers.await_open_push();
        }
        let victims = self.victims();
        victims.iter().for_each(|&task| self.daemons.kill(task));
        self.count(victims.len() as u64);
        let other = 1 + self.chance.below(u64::from(WORKERS) - 1) as usize;
        match plan.synchronous {
            true => self.kill_worker(if round.is_multiple_of(2) { 0 } else { other }),
            false if round.is_multiple_of(WORKER_KILL_EVERY) => self.kill_a_worker(),
            false => {}
        }
        victims.into_iter().for_each(|task| self.revive(task));
    }

    /// Stops a worker or a server in the middle of a push: for less than half a lease, for longer
    /// than a lease, or for longer than the token timeout. Sometimes kills the stopped process.
    fn stop(&mut self) {
        let length = self.draw_duration();
        let is_worker = self.chance.once_in(2);
        let task = self.chance.below(self.daemons.tasks() as u64) as usize;
        let worker = self.chance.below(WORKERS.into()) as usize;
        let dies = self.chance.once_in(8);
        match is_worker {
            true => {
                self.workers.await_open_push_of(worker);
                self.workers.stop(worker);
                std::thread::sleep(length);
                match dies {
                    true => self.kill_worker(worker),
                    false => self.workers.resume(worker),
                }
            }
            false => {
                self.workers.await_open_push();
                self.daemons.pause(task);
                std::thread::sleep(length);
                match dies {
                    true => {
                        self.daemons.kill(task);
                        self.report.other_kills += 1;
                        self.revive(task);
                    }
                    false => self.daemons.resume(task),
                }
            }
        }
        self.report.stops += 1;
    }

    /// Draws how long a fault lasts.
    fn draw_duration(&mut self) -> Duration {
        match self.chance.below(3) {
            0 => Duration::from_millis(self.chance.below(LEASE.as_millis() as u64 / 2)),
            1 => LEASE + LEASE / 2,
            _ => TOO_LONG,
        }
    }

    /// Cuts a link, which stays down for some time or accepts connections at once.
    fn cut(&mut self) {
        self.workers.await_open_push();
        let how = if self.chance.once_in(2) { Cut::Reset } else { Cut::Close };
        let lasts = self.chance.once_in(2).then(|| self.draw_duration());
        let number = self.chance.below(u64::MAX);
        self.with_link(number, |link| {
            link.cut(how, lasts.is_some());
            lasts.into_iter().for_each(std::thread::sleep);
        });
        self.report.cuts += 1;
    }

    /// Stalls a link for some time, in one direction or both. Sometimes resets it afterwards.
    fn stall(&mut self) {
        self.workers.await_open_push();
        let (to_server, from_server) =
            [(true, true), (true, false), (false, true)][self.chance.below(3) as usize];
        let length = self.draw_duration();
        let number = self.chance.below(u64::MAX);
        let is_cut = self.chance.once_in(4);
        self.with_link(number, |link| {
            link.stall(Stall { to_server, from_server });
            std::thread::sleep(length);
            if is_cut {
                link.cut(Cut::Reset, false);
            }
        });
        self.report.stalls += 1;
    }

    /// Applies a fault to a link, then heals the link.
    fn with_link(&self, number: u64, work: impl FnOnce(&Link)) {
        let links = self.links.as_ref().expect("a plan with cuts has links");
        let link = links.pair(number);
        work(link);
        link.heal();
    }

    /// Injects a full disk, or makes the checkpoint or state directory unusable.
    fn disk_fault(&mut self) {
        match self.chance.below(3) {
            0 => self.full_disk(),
            1 => self.no_checkpoints(),
            _ => self.no_state(),
        }
        self.report.disk_faults += 1;
    }

    /// Limits the file size of all servers for some time: saves fail and training must continue.
    fn full_disk(&mut self) {
        // The tables grow at the first pushes. Without room for that nothing goes on.
        self.await_some_progress();
        self.daemons.limit_files(Some(FULL_BYTES));
        self.await_some_progress();
        // A save that was in progress when the disk became full may still have succeeded.
        let newest = damage::newest(&self.daemons.checkpoints());
        self.await_some_progress();
        self.daemons.limit_files(None);
        self.await_newer(newest);
    }

    /// Makes the checkpoint directory unusable for some time: replaces it by a file, or sometimes
    /// makes it read-only, unless the test runs as root.
    fn no_checkpoints(&mut self) {
        let directory = self.daemons.checkpoints();
        let aside = directory.with_extension("aside");
        let newest = damage::newest(&directory);
        let read_only = !rustix::process::geteuid().is_root() && self.chance.once_in(2);
        match read_only {
            true => damage::permit(&directory, 0o500),
            false => damage::replace(&directory, &aside),
        }
        self.await_some_progress();
        match read_only {
            true => damage::permit(&directory, 0o700),
            false => damage::put_back(&directory, &aside),
        }
        self.await_newer(newest);
    }

    /// Starts a server while its state directory is a file. The server must exit with an error; it
    /// is started again after the directory is back.
    fn no_state(&mut self) {
        let task = self.chance.below(self.daemons.tasks() as u64) as usize;
        self.daemons.kill(task);
        self.report.other_kills += 1;
        let state = self.daemons.state(task);
        let aside = state.with_extension("aside");
        damage::replace(&state, &aside);
        self.daemons.restart(task);
        let status = self.daemons.await_end(task);
        assert_eq!(
            status.code(),
            Some(REFUSED),
            "a server whose state is a file ends with {status}"
        );
        damage::put_back(&state, &aside);
        self.revive(task);
    }

    /// Waits until the training has made some pushes.
    fn await_some_progress(&mut self) {
        for _ in 0..3 {
            self.await_progress();
        }
    }

    /// Waits until a checkpoint newer than `than` is published.
    fn await_newer(&mut self, than: Option<damage::DamagedName>) {
        let since = Instant::now();
        while damage::newest(&self.daemons.checkpoints()) <= than {
            self.daemons.assert_alive();
            self.workers.catch_up();
            assert!(since.elapsed() < TIMEOUT, "no checkpoint is published after {than:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
        self.note_checkpoints();
    }

    /// Records the current checkpoints. Others may have been published and removed since the last
    /// call.
    fn note_checkpoints(&mut self) {
        let names = damage::checkpoints(&self.daemons.checkpoints());
        self.report
            .checkpoints
            .extend(names.into_iter().map(|name| (self.setting.folder.clone(), name)));
    }

    /// Flips a bit of a killed server's files. The server must refuse them or serve correct values,
    /// which the judgement checks.
    fn damage(&mut self) {
        let task = self.chance.below(self.daemons.tasks() as u64) as usize;
        self.workers.await_open_push();
        self.daemons.kill(task);
        self.report.other_kills += 1;
        let flip = damage::flip_in(&self.daemons.state(task), self.chance);
        self.report.damages += 1;
        self.daemons.restart(task);
        if let Some(status) = self.daemons.await_answers_or_end(task) {
            assert_eq!(status.code(), Some(REFUSED), "ps {task} ends with {status} after {flip}");
            self.report.damages_refused += 1;
            flip.undo();
            self.revive(task);
        }
    }

    /// Removes the state of all servers and lets the chief restore a checkpoint.
    ///
    /// The servers must restore the newest checkpoint, or an older one if the newest is damaged. It
    /// must have every push that was acknowledged before it was begun.
    fn restore(&mut self) {
        let is_damaged = self.report.restores.is_multiple_of(2);
        self.workers.catch_up();
        let floors: Vec<Vec<Entry>> =
            self.workers.histories.iter().map(|history| history.entries.clone()).collect();
        // The next checkpoint may have been begun before now; the ones after it were not.
        for _ in 0..2 + u64::from(is_damaged) {
            let newest = damage::newest(&self.daemons.checkpoints());
            self.await_newer(newest);
        }
        let tasks = 0..self.daemons.tasks();
        tasks.clone().for_each(|task| self.daemons.kill(task));
        self.report.other_kills += tasks.len() as u64;
        self.workers.kill_all();
        for task in tasks.clone() {
            fs::remove_dir_all(self.daemons.state(task)).expect("a state can be removed");
        }
        let checkpoints = self.daemons.checkpoints();
        let newest = damage::newest(&checkpoints).expect("checkpoints were published");
        let flip =
            is_damaged.then(|| damage::flip_in(&checkpoints.join(newest.to_string()), self.chance));
        self.report.damages_of_checkpoints += u64::from(is_damaged);
        tasks.for_each(|task| _ = self.daemons.restart(task));
        let restored = self.restore_as_chief();
        let what = flip.map_or("nothing".to_owned(), |flip| flip.to_string());
        let is_newest = restored == newest.to_string();
        assert_eq!(
            is_newest, !is_damaged,
            "{restored} was restored, the newest is {newest}, damaged: {what}"
        );
        let (verdict, found) =
            read_and_judge(&self.setting, &self.workers.histories, Some(&floors));
        self.report.verdict.add(verdict);
        self.lose_again(&found);
        self.workers.note_restore();
        for (history, found) in self.workers.histories.iter_mut().zip(found) {
            history.base = found;
        }
        self.report.restores += 1;
        self.workers.start_all();
    }

    /// Loses the state of one server or of all again, before anybody has trained since the restore.
    /// The chief restores the same values. A worker that has joined in between and was away must be
    /// told.
    fn lose_again(&mut self, restored: &Found) {
        let mut away = Worker::connect(self.setting.worker_config(1)).expect("servers are up");
        away.join(&self.setting.variables(), |_| ()).expect("the variables have values");
        let tasks = self.daemons.tasks();
        let lost: Vec<usize> = match self.chance.once_in(2) {
            true => (0..tasks).collect(),
            false => vec![self.chance.below(tasks as u64) as usize],
        };
        lost.iter().for_each(|&task| self.daemons.kill(task));
        self.report.other_kills += lost.len() as u64;
        for &task in &lost {
            fs::remove_dir_all(self.daemons.state(task)).expect("a state can be removed");
        }
        lost.iter().for_each(|&task| _ = self.daemons.restart(task));
        self.restore_as_chief();
        match away.token() {
            Err(error) if error.advice() == Advice::Rejoin => {}
            told => panic!("{lost:?} were restored again, and a worker is told {told:?}"),
        }
        let (verdict, found) = read_and_judge(&self.setting, &self.workers.histories, None);
        assert_eq!(&found, restored, "{lost:?} were restored again with other values");
        // Acknowledged pushes that the checkpoint lacks were judged at the first restore.
        self.report.verdict.torn += verdict.torn;
        self.report.second_losses += 1;
    }

    /// Joins as the chief until the variables have values. Returns the name of the restored
    /// checkpoint.
    fn restore_as_chief(&self) -> String {
        let config = self.setting.worker_config(0);
        let mut chief = Worker::connect(config).expect("a chief connects to servers that are up");
        chief.join(&self.setting.variables(), |_| ()).expect("a chief can restore a checkpoint");
        let restored = chief.restored().expect("the values are from a checkpoint").name.clone();
        chief.leave().expect("a chief may leave");
        restored
    }

    fn kill_workers(&mut self, rounds: u64) {
        for _ in 0..rounds {
            self.kill_a_worker();
            self.await_progress();
            self.pause(PAUSE_US_MAX);
        }
    }

    /// Draws the servers to kill: usually one, sometimes all.
    fn victims(&mut self) -> Vec<usize> {
        let tasks = self.daemons.tasks();
        match self.chance.once_in(6) {
            true => (0..tasks).collect(),
            false => vec![self.chance.below(tasks as u64) as usize],
        }
    }

    /// Counts killed servers, and whether a push was in flight. A push that is open while a server
    /// is dead was open when it died.
    fn count(&mut self, kills: u64) {
        self.report.kills += kills;
        if self.workers.have_open_pushes() {
            self.report.in_flight += kills;
        }
    }

    /// Restarts a server until it answers. Sometimes kills it again before that.
    fn revive(&mut self, task: usize) {
        loop {
            let since = self.daemons.restart(task);
            if !self.chance.once_in(STILLBORN_EVERY) {
                let recovery = self.daemons.await_answers(task, since);
                return self.report.recoveries.push(recovery);
            }
            self.pause(STILLBORN_US_MAX);
            self.daemons.kill(task);
            self.report.other_kills += 1;
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

    /// Sleeps for a random time below `us_max`, so that the next fault comes at a random moment.
    fn pause(&mut self, us_max: u64) {
        std::thread::sleep(Duration::from_micros(self.chance.below(us_max)));
    }
}

/// The exit code of a server that cannot start.
const REFUSED: i32 = 2;

/// Judges the values after one more kill, and again after an orderly restart if the servers keep
/// their state through one.
fn judge_later(
    plan: &Plan,
    setting: &ChaosSetting,
    daemons: &mut Daemons,
    histories: &[History],
) -> LedgerVerdict {
    let judge = || read_and_judge(setting, histories, None).0;
    let mut verdict = LedgerVerdict::default();
    let tasks = 0..daemons.tasks();
    if plan.counts.kills > 0 {
        tasks.clone().for_each(|task| daemons.kill(task));
        restart_all(daemons);
        verdict.add(judge());
    }
    daemons.stop();
    if plan.counts.kills > 0 && daemons.have_states() {
        restart_all(daemons);
        verdict.add(judge());
        daemons.stop();
    }
    verdict
}

/// Finishes the training as the chief. Returns the number of gradients for which the step owner
/// refuses final values, because they are on some shards only.
fn partly_applied(setting: &ChaosSetting) -> u64 {
    let mut chief = Worker::connect(setting.worker_config(0)).expect("servers are up");
    let joined = chief.join(&setting.variables(), |_| ());
    let mut params = joined.expect("the variables have values");
    chief.finish().expect("the chief may end the training");
    let partly = match chief.pull_final(&mut params) {
        Ok(_) => 0,
        Err(pushpull::Error::Refused { refusal: Refusal::NotFinal { pushes }, .. }) => pushes,
        Err(error) => panic!("the training does not end: {}", Chain(&error)),
    };
    chief.leave().expect("a chief may leave");
    partly
}

fn restart_all(daemons: &mut Daemons) {
    let started: Vec<_> = (0..daemons.tasks()).map(|task| daemons.restart(task)).collect();
    for (task, since) in started.into_iter().enumerate() {
        daemons.await_answers(task, since);
    }
}

fn read_and_judge(
    setting: &ChaosSetting,
    histories: &[History],
    floors: Option<&[Vec<Entry>]>,
) -> (LedgerVerdict, Found) {
    let config = setting.worker_config(WORKERS);
    let mut reader = Reader::connect(config).expect("a reader connects to servers that are up");
    let mut params = reader.params();
    reader.pull(&mut params).expect("servers that are up answer a pull");
    judge(setting, &params, &mut reader, histories, floors)
        .expect("the cluster has the declared variables")
}
