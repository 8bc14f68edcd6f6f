//! One cluster from its start to the judgement: rounds of faults, at random moments.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::{TaskId, WorkerConfig};

use crate::chance::Chance;
use crate::daemons::{Daemons, Transport};
use crate::damage;
use crate::history::{Entry, History};
use crate::hostile::HostileClients;
use crate::ledger::{Found, Verdict, judge};
use crate::links::{Cut, Link, Links, Stall};
use crate::process::{BLINK, TIMEOUT};
use crate::report::Report;
use crate::setting::{LEASE, Setting, TOO_LONG, WORKERS};
use crate::workers::Workers;

/// What one cluster is like, and what is done to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) tasks: usize,
    pub(crate) transport: Transport,
    /// Whether each pair of tasks has a link that can be cut. Then leases and tokens are short.
    pub(crate) has_links: bool,
    /// Whether hostile clients send valid messages with mutated numbers.
    pub(crate) is_attacked: bool,
    /// Whether steps are synchronous. Then a worker is killed with each server, in turns the chief.
    pub(crate) synchronous: bool,
    pub(crate) counts: Counts,
    /// In how many rounds, if no server is killed, a worker is.
    pub(crate) worker_rounds: u64,
    /// How long the rounds go on at least, whatever the counts.
    pub(crate) lasts: Duration,
}

/// How much of what is done to a cluster.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Servers that are killed.
    pub(crate) kills: u64,
    /// Workers and servers that are stopped for a while.
    pub(crate) stops: u64,
    pub(crate) cuts: u64,
    pub(crate) stalls: u64,
    pub(crate) disk_faults: u64,
    /// State files that are damaged; checkpoints are with every other restore.
    pub(crate) damages: u64,
    pub(crate) restores: u64,
}

impl Counts {
    fn all(&self) -> [u64; 7] {
        let Counts { kills, stops, cuts, stalls, disk_faults, damages, restores } = *self;
        [kills, stops, cuts, stalls, disk_faults, damages, restores]
    }
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

/// The longest pause where hostile clients connect: a server must live long enough to give them rooms.
const ATTACKED_US_MAX: u64 = 600_000;

/// A server that is killed before it answers lives so long, at most.
const STILLBORN_US_MAX: u64 = 8_000;

/// Bytes that a file of a server may have while its disk is full.
const FULL_BYTES: u64 = 64 << 10;

/// Runs the plan below a folder of its own.
pub(crate) fn run(plan: &Plan, folder: &Path, chance: &mut Chance) -> Report {
    let folder = folder.join(plan.name);
    fs::create_dir(&folder).expect("a folder for the cluster");
    let hosts = plan.transport.addresses(&folder, plan.tasks, chance);
    let links = plan.has_links.then(|| Arc::new(Links::start(&hosts, WORKERS as usize)));
    let (synchronous, expires) = (plan.synchronous, plan.has_links);
    let setting = Setting { hosts, chunks: chunks(plan), synchronous, expires, folder };
    let mut rounds = Rounds {
        daemons: Daemons::start(&setting, links.clone()),
        workers: Workers::start(&setting, links.clone()),
        setting: setting.clone(),
        links,
        report: Report::default(),
        chance,
    };
    // What is killed is a training; that servers die before there are variables is another test.
    rounds.workers.await_all();
    let hostile = plan.is_attacked.then(|| HostileClients::start(&setting, rounds.chance));
    let since = Instant::now();
    rounds.all(plan);
    rounds.kill_workers(plan.worker_rounds);
    let seconds = since.elapsed().as_secs_f64();
    rounds.note_checkpoints();
    let Rounds { mut daemons, workers, mut report, .. } = rounds;
    if let Some(hostile) = hostile {
        report.hostile = hostile.finish();
        report.hostile.assert_deep(plan.synchronous);
    }
    let (histories, given_up) = workers.finish();
    report.given_up = given_up;
    daemons.await_memory_back();
    report.slots_lost = daemons.slots_lost();
    report.acknowledged = histories.iter().map(|history| history.acknowledged).sum();
    report.stale = histories.iter().map(|history| history.stale).sum();
    report.refused = histories.iter().map(|history| history.refused).sum();
    let invoked: u64 = histories.iter().map(|history| history.invoked).sum();
    report.unknown = invoked - report.acknowledged - report.stale - report.refused;
    report.verdict.add(judge_now_and_later(plan, &setting, &mut daemons, &histories));
    report.panics = daemons.panics();
    println!("{}: {seconds:.1} s, {}", plan.name, report.told());
    report
}

/// Ledgers for so many pushes that hardly two meet at one element in a run of the usual length.
fn chunks(plan: &Plan) -> u64 {
    if !plan.lasts.is_zero() {
        return CHUNKS_MAX;
    }
    (4 + (plan.counts.all().iter().sum::<u64>() + plan.worker_rounds) / 12).min(CHUNKS_MAX)
}

/// The most ledgers of a worker on a shard.
const CHUNKS_MAX: u64 = 40;

/// A cluster, and what has been done to it so far.
struct Rounds<'a> {
    setting: Setting,
    daemons: Daemons,
    workers: Workers,
    links: Option<Arc<Links>>,
    report: Report,
    chance: &'a mut Chance,
}

impl Rounds<'_> {
    /// Does all that the plan has, in an order that is drawn.
    fn all(&mut self, plan: &Plan) {
        let (since, mut round) = (Instant::now(), 0);
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
            match kind.expect("what is drawn is one of those that are left") {
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

    /// Kills servers, and at times workers with them.
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

    /// Stops a worker or a server in the middle of a push: for a moment, for longer than a lease, or for
    /// longer than a token is good for. At times it is killed as it lies there.
    fn stop(&mut self) {
        let length = self.a_while();
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
                    false => self.workers.go_on(worker),
                }
            }
            false => {
                self.workers.await_open_push();
                self.daemons.stop_for_now(task);
                std::thread::sleep(length);
                match dies {
                    true => {
                        self.daemons.kill(task);
                        self.report.kills_beside += 1;
                        self.revive(task);
                    }
                    false => self.daemons.go_on(task),
                }
            }
        }
        self.report.stops += 1;
    }

    /// What is drawn is how long a fault lasts.
    fn a_while(&mut self) -> Duration {
        match self.chance.below(3) {
            0 => Duration::from_millis(self.chance.below(LEASE.as_millis() as u64 / 2)),
            1 => LEASE + LEASE / 2,
            _ => TOO_LONG,
        }
    }

    /// Cuts a link, which stays down for a while or is up at once.
    fn cut(&mut self) {
        self.workers.await_open_push();
        let how = if self.chance.once_in(2) { Cut::Reset } else { Cut::Close };
        let lasts = self.chance.once_in(2).then(|| self.a_while());
        let number = self.chance.below(u64::MAX);
        self.with_link(number, |link| {
            link.cut(how, lasts.is_some());
            lasts.into_iter().for_each(std::thread::sleep);
        });
        self.report.cuts += 1;
    }

    /// Forwards nothing over a link in one direction or in both, for a while; at times it is cut then.
    fn stall(&mut self) {
        self.workers.await_open_push();
        let (to_server, from_server) =
            [(true, true), (true, false), (false, true)][self.chance.below(3) as usize];
        let (length, number) = (self.a_while(), self.chance.below(u64::MAX));
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

    /// Does something to a link, and heals it.
    fn with_link(&self, number: u64, work: impl FnOnce(&Link)) {
        let links = self.links.as_ref().expect("a plan that cuts has links");
        let link = links.pair(number);
        work(link);
        link.heal();
    }

    /// A disk that is full, or directories that are not there or not to be used.
    fn disk_fault(&mut self) {
        match self.chance.below(3) {
            0 => self.full_disk(),
            1 => self.no_checkpoints(),
            _ => self.no_state(),
        }
        self.report.disk_faults += 1;
    }

    /// No server can write a long file for a while: saves fail, and training goes on.
    fn full_disk(&mut self) {
        self.daemons.limit_files(Some(FULL_BYTES));
        self.train_on();
        // What was under way as the disk became full may have been written already.
        let newest = damage::newest(&self.daemons.checkpoints());
        self.train_on();
        self.daemons.limit_files(None);
        self.await_newer(newest);
    }

    /// The directory for checkpoints cannot be used: it is a file, or if that hinders us it is read-only.
    fn no_checkpoints(&mut self) {
        let directory = self.daemons.checkpoints();
        let aside = directory.with_extension("aside");
        let newest = damage::newest(&directory);
        let read_only = !rustix::process::geteuid().is_root() && self.chance.once_in(2);
        match read_only {
            true => damage::permit(&directory, 0o500),
            false => damage::replace(&directory, &aside),
        }
        self.train_on();
        match read_only {
            true => damage::permit(&directory, 0o700),
            false => damage::put_back(&directory, &aside),
        }
        self.await_newer(newest);
    }

    /// A server is started where its state directory is a file, or if that hinders it is read-only: it
    /// ends, and is started again once the directory is back.
    fn no_state(&mut self) {
        let task = self.chance.below(self.daemons.tasks() as u64) as usize;
        self.daemons.kill(task);
        self.report.kills_beside += 1;
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

    /// Lets the training make some pushes.
    fn train_on(&mut self) {
        for _ in 0..3 {
            self.await_progress();
        }
    }

    /// Waits until a checkpoint is published that is newer than this one.
    fn await_newer(&mut self, than: Option<damage::Name>) {
        let since = Instant::now();
        while damage::newest(&self.daemons.checkpoints()) <= than {
            self.daemons.assert_alive();
            self.workers.catch_up();
            assert!(since.elapsed() < TIMEOUT, "no checkpoint is published after {than:?}");
            std::thread::sleep(BLINK);
        }
        self.note_checkpoints();
    }

    /// Notes the checkpoints there are; others may have come and gone.
    fn note_checkpoints(&mut self) {
        let names = damage::checkpoints(&self.daemons.checkpoints());
        self.report
            .checkpoints
            .extend(names.into_iter().map(|name| (self.setting.folder.clone(), name)));
    }

    /// A bit of a server's files is another one when it comes back. It refuses them, or what it serves
    /// is right: that is judged with everything else.
    fn damage(&mut self) {
        let task = self.chance.below(self.daemons.tasks() as u64) as usize;
        self.workers.await_open_push();
        self.daemons.kill(task);
        self.report.kills_beside += 1;
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

    /// All servers lose their state, and the chief has them restore a checkpoint: the newest, or the one
    /// before it if the newest is damaged. What was acknowledged before it was begun is there.
    fn restore(&mut self) {
        let is_damaged = self.report.restores.is_multiple_of(2);
        self.workers.catch_up();
        let floors: Vec<Vec<Entry>> =
            self.workers.histories.iter().map(|history| history.entries.clone()).collect();
        // The first that comes now may have been begun before, the next ones were not.
        for _ in 0..2 + u64::from(is_damaged) {
            let newest = damage::newest(&self.daemons.checkpoints());
            self.await_newer(newest);
        }
        let tasks = 0..self.daemons.tasks();
        tasks.clone().for_each(|task| self.daemons.kill(task));
        self.report.kills_beside += tasks.len() as u64;
        self.workers.kill_all();
        for task in tasks.clone() {
            fs::remove_dir_all(self.daemons.state(task)).expect("a state can be removed");
        }
        let checkpoints = self.daemons.checkpoints();
        let newest = damage::newest(&checkpoints).expect("some were published");
        let flip =
            is_damaged.then(|| damage::flip_in(&checkpoints.join(newest.to_string()), self.chance));
        self.report.damages_of_checkpoints += u64::from(is_damaged);
        tasks.for_each(|task| _ = self.daemons.restart(task));
        let restored = self.restore_as_chief();
        let what = flip.map_or("nothing".to_owned(), |flip| flip.to_string());
        let is_newest = restored == newest.to_string();
        assert_eq!(
            is_newest, !is_damaged,
            "{restored} is restored after {newest}, damaged: {what}"
        );
        let (verdict, found) =
            read_and_judge(&self.setting, &self.workers.histories, Some(&floors));
        self.report.verdict.add(verdict);
        self.workers.note_restore();
        for (history, found) in self.workers.histories.iter_mut().zip(found) {
            history.base = found;
        }
        self.report.restores += 1;
        self.workers.start_all();
    }

    /// Takes the chief's part until the variables have values; which checkpoint they are of.
    fn restore_as_chief(&self) -> String {
        let config = WorkerConfig::new(self.setting.cluster(), TaskId::worker(0));
        let mut chief = Worker::connect(config).expect("a chief connects to servers that are up");
        chief.join(&self.setting.variables(), |_| ()).expect("a chief has a checkpoint restored");
        let restored = chief.restored().expect("there was nothing but a checkpoint").name.clone();
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
            self.report.kills_beside += 1;
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

/// The exit code of a server that cannot start.
const REFUSED: i32 = 2;

/// Judges what there is, and again after one more kill, in peace, and after a restart of the
/// orderly kind if servers keep their state through one.
fn judge_now_and_later(
    plan: &Plan,
    setting: &Setting,
    daemons: &mut Daemons,
    histories: &[History],
) -> Verdict {
    let judge = || read_and_judge(setting, histories, None).0;
    let mut verdict = judge();
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

fn restart_all(daemons: &mut Daemons) {
    let started: Vec<_> = (0..daemons.tasks()).map(|task| daemons.restart(task)).collect();
    for (task, since) in started.into_iter().enumerate() {
        daemons.await_answers(task, since);
    }
}

fn read_and_judge(
    setting: &Setting,
    histories: &[History],
    floors: Option<&[Vec<Entry>]>,
) -> (Verdict, Found) {
    let config = WorkerConfig::new(setting.cluster(), TaskId::worker(WORKERS));
    let mut reader = Reader::connect(config).expect("a reader connects to servers that are up");
    let mut params = reader.params();
    reader.pull(&mut params).expect("servers that are up answer a pull");
    judge(setting, &params, &mut reader, histories, floors)
        .expect("the variables are those that were declared")
}
