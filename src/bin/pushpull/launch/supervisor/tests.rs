//! Tables of launches: what happens, and what the supervisor does.

use super::*;

/// A launch in virtual time, whose tasks are written `ps`, `worker` and `board`.
struct Launch {
    supervisor: Supervisor,
    start: Instant,
}

impl Launch {
    /// Starts tasks, such as `"ps worker worker"`. Checks that each is started.
    fn new(tasks: &str, restarts: u32) -> Launch {
        let policy =
            Policy { restarts, grace: Duration::from_secs(5), kill_after: Duration::from_secs(10) };
        let kinds = tasks.split(' ').enumerate().map(|(index, kind)| {
            let kind = match kind {
                "ps" => TaskKind::Ps,
                "worker" => TaskKind::Worker,
                _ => TaskKind::Companion,
            };
            (format!("t{index}"), kind)
        });
        let mut launch =
            Launch { supervisor: Supervisor::new(kinds, policy), start: Instant::now() };
        let started: Vec<String> =
            (0..tasks.split(' ').count()).map(|task| format!("start {task}/0")).collect();
        assert_eq!(launch.actions(), started.join(", "));
        launch
    }

    fn at(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }

    /// Returns what the supervisor does, without its lines.
    fn actions(&mut self) -> String {
        let actions = std::iter::from_fn(|| self.supervisor.next_action());
        let text = |action| match action {
            Action::Start { task, incarnation } => Some(format!("start {task}/{incarnation}")),
            Action::Terminate(task) => Some(format!("term {task}")),
            Action::Kill(task) => Some(format!("kill {task}")),
            Action::GiveUp(task) => Some(format!("leave {task}")),
            Action::Say(_) | Action::Complain(_) => None,
        };
        actions.filter_map(text).collect::<Vec<_>>().join(", ")
    }

    fn ended(&mut self, millis: u64, task: usize, end: &TaskEnd) -> String {
        self.supervisor.ended(self.at(millis), task, end);
        self.actions()
    }

    fn signalled(&mut self, millis: u64, signal: u8) -> String {
        self.supervisor.signalled(self.at(millis), signal);
        self.actions()
    }

    /// Lets time pass until there is something to do; checks when that is.
    fn tick(&mut self, millis: u64) -> String {
        assert_eq!(self.supervisor.deadline(), Some(self.at(millis)));
        let before = self.at(millis) - Duration::from_millis(1);
        self.supervisor.tick(before);
        assert_eq!(self.actions(), "");
        self.supervisor.tick(self.at(millis));
        self.actions()
    }

    fn exit_code(&self) -> Option<u8> {
        self.supervisor.exit_code()
    }
}

const WELL: TaskEnd = TaskEnd::Exit(0);
const BY_TERM: TaskEnd = TaskEnd::Signal(15);

#[test]
fn ps_tasks_have_time_to_end_after_the_last_worker_and_are_ended_then() {
    let mut launch = Launch::new("ps ps worker worker board", 0);
    assert_eq!(launch.ended(1, 2, &WELL), "");
    assert_eq!(launch.supervisor.deadline(), None);
    assert_eq!(launch.ended(100, 3, &WELL), "");
    assert_eq!(launch.ended(200, 0, &WELL), "", "it has ended by itself");
    assert_eq!(launch.tick(5100), "term 1, term 4");
    assert_eq!(launch.exit_code(), None);
    assert_eq!(launch.ended(5200, 1, &BY_TERM), "");
    assert_eq!(launch.ended(5300, 4, &BY_TERM), "");
    assert_eq!(launch.exit_code(), Some(0));
}

#[test]
fn a_launch_ends_when_all_have_ended_by_themselves() {
    let mut launch = Launch::new("ps worker board", 0);
    assert_eq!(launch.ended(1, 1, &WELL), "");
    assert_eq!(launch.ended(2, 0, &WELL), "term 2");
    assert_eq!(launch.ended(3, 2, &BY_TERM), "");
    assert_eq!(launch.exit_code(), Some(0));
    // Servers without workers last as long as they want.
    let mut launch = Launch::new("ps ps", 0);
    assert_eq!(launch.ended(1, 0, &WELL), "");
    assert_eq!((launch.supervisor.deadline(), launch.exit_code()), (None, None));
    assert_eq!(launch.ended(2, 1, &WELL), "");
    assert_eq!(launch.exit_code(), Some(0));
}

#[test]
fn the_first_failure_ends_all_and_is_the_exit_code() {
    for (end, code) in [
        (TaskEnd::Exit(3), 3),
        (TaskEnd::Signal(9), 137),
        (TaskEnd::NotStarted("no memory".into()), 126),
    ] {
        let mut launch = Launch::new("ps worker worker board", 0);
        assert_eq!(launch.ended(0, 2, &end), "term 0, term 1, term 3");
        for (task, end) in [(0, TaskEnd::Exit(4)), (1, BY_TERM), (3, BY_TERM)] {
            assert_eq!(launch.exit_code(), None);
            assert_eq!(launch.ended(1, task, &end), "");
        }
        assert_eq!(launch.exit_code(), Some(code));
    }
}

#[test]
fn a_ps_that_fails_after_the_workers_fails_the_launch_unless_by_our_signals() {
    for (end, code) in [
        (TaskEnd::Exit(3), 3),
        (BY_TERM, 0),
        // A shell that reports the signal.
        (TaskEnd::Exit(143), 0),
        (TaskEnd::Signal(11), 139),
    ] {
        let mut launch = Launch::new("ps worker", 3);
        launch.ended(0, 1, &WELL);
        assert_eq!(launch.tick(5000), "term 0");
        launch.ended(5001, 0, &end);
        assert_eq!(launch.exit_code(), Some(code), "{end:?}");
    }
    let mut launch = Launch::new("ps worker", 3);
    launch.ended(0, 1, &WELL);
    launch.ended(1, 0, &TaskEnd::Exit(3));
    assert_eq!(launch.exit_code(), Some(3), "it does not start again without workers");
}

#[test]
fn failed_tasks_start_again_after_pauses_that_double() {
    let mut launch = Launch::new("ps worker worker", 3);
    let mut now = 0;
    for (incarnation, pause) in [(1, 250), (2, 500), (3, 1000)] {
        assert_eq!(launch.ended(now, 1, &TaskEnd::Signal(9)), "");
        now += pause;
        assert_eq!(launch.tick(now), format!("start 1/{incarnation}"));
        assert_eq!(launch.supervisor.deadline(), None);
    }
    // Each task has its own restarts.
    assert_eq!(launch.ended(now, 2, &TaskEnd::Exit(1)), "");
    assert_eq!(launch.tick(now + 250), "start 2/1");
    assert_eq!(launch.ended(now + 300, 1, &TaskEnd::Exit(7)), "term 0, term 2");
    assert_eq!((pause(6), pause(7), pause(u32::MAX)), (PAUSE_MIN * 64, PAUSE_MAX, PAUSE_MAX));
}

#[test]
fn nothing_starts_once_the_launch_ends() {
    let mut launch = Launch::new("ps worker worker", 5);
    launch.ended(0, 1, &TaskEnd::Exit(1));
    assert_eq!(launch.signalled(100, 2), "term 0, term 2");
    assert_eq!(launch.supervisor.deadline(), Some(launch.at(10_100)), "no restart is left");
    launch.ended(200, 2, &TaskEnd::Exit(1));
    launch.ended(200, 0, &WELL);
    assert_eq!(launch.exit_code(), Some(130));
    // A signal before the first start has been carried out.
    let tasks = [("t0".to_owned(), TaskKind::Ps)];
    let policy = launch.supervisor.policy;
    let supervisor = Supervisor::new(tasks, policy);
    let mut launch = Launch { supervisor, start: Instant::now() };
    assert_eq!(launch.signalled(0, 15), "");
    assert_eq!(launch.exit_code(), Some(143));
}

#[test]
fn a_task_that_ignores_sigterm_is_killed_and_one_that_outlives_that_is_left() {
    let mut launch = Launch::new("ps worker", 0);
    assert_eq!(launch.signalled(0, 15), "term 0, term 1");
    launch.ended(1, 1, &BY_TERM);
    assert_eq!(launch.tick(10_000), "kill 0");
    assert_eq!(launch.tick(15_000), "leave 0");
    assert_eq!(launch.exit_code(), Some(143));
    assert_eq!(launch.ended(16_000, 0, &TaskEnd::Signal(9)), "", "late");
}

#[test]
fn a_second_signal_kills_and_a_third_changes_nothing() {
    let mut launch = Launch::new("ps worker", 0);
    assert_eq!(launch.signalled(0, 2), "term 0, term 1");
    assert_eq!(launch.signalled(50, 15), "kill 0, kill 1");
    assert_eq!(launch.signalled(60, 2), "");
    launch.ended(70, 0, &TaskEnd::Signal(9));
    launch.ended(70, 1, &TaskEnd::Signal(9));
    assert_eq!(launch.exit_code(), Some(130), "that of the first");
}

#[test]
fn the_others_go_on_without_a_companion() {
    let mut launch = Launch::new("ps worker board", 2);
    assert_eq!(launch.ended(0, 2, &TaskEnd::Exit(1)), "");
    assert_eq!(launch.supervisor.deadline(), None);
    launch.ended(1, 1, &WELL);
    launch.ended(2, 0, &WELL);
    assert_eq!(launch.exit_code(), Some(0));
}

#[test]
fn the_lines_name_the_task_and_its_end() {
    let mut launch = Launch::new("ps worker worker", 1);
    let mut said = |ends: &[(usize, TaskEnd)]| {
        ends.iter().for_each(|(task, end)| launch.supervisor.ended(launch.start, *task, end));
        let actions = std::iter::from_fn(|| launch.supervisor.next_action());
        let lines = actions.filter_map(|action| match action {
            Action::Say(line) | Action::Complain(line) => Some(line),
            _ => None,
        });
        lines.collect::<Vec<_>>()
    };
    assert_eq!(said(&[(2, WELL)]), ["t2 ended"]);
    let restart = said(&[(1, TaskEnd::Signal(9))]);
    assert_eq!(restart, ["t1 was ended by signal 9: restart 1 of 1 in 250 ms"]);
    assert_eq!(launch.tick(250), "start 1/1");
    launch.supervisor.ended(launch.at(250), 1, &TaskEnd::Exit(2));
    let line = launch.supervisor.next_action();
    let expected = "t1 ended with exit code 2: all others are ended";
    assert_eq!(line, Some(Action::Complain(expected.to_owned())));
}
