use std::sync::mpsc;

use super::*;

/// Only ends a hang.
const LONG: Duration = Duration::from_secs(120);

fn failure_text(joined: Result<Option<String>, TasksError<String>>) -> String {
    joined.unwrap_err().to_string()
}

#[test]
fn tasks_that_end_by_themselves_are_a_success() {
    let tasks = Tasks::<String>::new();
    let (sender, receiver) = mpsc::channel();
    for name in ["a", "b"] {
        let sender = sender.clone();
        tasks
            .spawn(name, move |stop| {
                assert_eq!(thread::current().name(), Some(name));
                sender.send(stop.is_requested()).map_err(|error| error.to_string())
            })
            .unwrap();
    }
    assert_eq!(tasks.join(LONG).unwrap(), None);
    drop(sender);
    assert_eq!(receiver.iter().collect::<Vec<_>>(), [false, false]);
    assert!(!tasks.should_stop() && tasks.running().is_empty());
}

#[test]
fn the_first_of_two_errors_is_returned() {
    let tasks = Tasks::<String>::new();
    tasks
        .spawn("second", |stop| {
            assert!(stop.wait(LONG));
            assert_eq!(stop.cause(), Some(StopCause::Failed("first".to_owned())));
            Err("late".to_owned())
        })
        .unwrap();
    tasks.spawn("first", |_| Err("early".to_owned())).unwrap();
    let text = "cannot finish the tasks: task \"first\" failed: early";
    assert_eq!(failure_text(tasks.join(LONG)), text);
    assert_eq!(failure_text(tasks.join(LONG)), text, "the second join has the same result");
    assert_eq!(tasks.later_failures(), 1);
}

#[test]
fn a_clean_stop_is_no_failure() {
    let tasks = Tasks::<String>::new();
    tasks.spawn("waits", |stop| stop.wait(LONG).then_some(()).ok_or("no stop".to_owned())).unwrap();
    tasks.request_stop("the last step");
    tasks.request_stop("another reason");
    assert_eq!(tasks.join(LONG).unwrap(), Some("the last step".to_owned()));
    assert_eq!(tasks.join(LONG).unwrap(), Some("the last step".to_owned()));
    // A task can be started after a stop, and sees it.
    tasks.spawn("late", |stop| stop.is_requested().then_some(()).ok_or(String::new())).unwrap();
    assert_eq!(tasks.join(LONG).unwrap(), Some("the last step".to_owned()));
}

#[test]
fn a_task_stops_the_others() {
    let tasks = Tasks::<String>::new();
    tasks.spawn("waits", |stop| stop.wait(LONG).then_some(()).ok_or("no stop".to_owned())).unwrap();
    tasks
        .spawn("reader", |stop| {
            stop.request("the data has ended");
            Ok(())
        })
        .unwrap();
    assert_eq!(tasks.join(LONG).unwrap(), Some("the data has ended".to_owned()));
}

#[test]
fn a_straggler_is_named() {
    let tasks = Tasks::<String>::new();
    let (release, released) = mpsc::channel::<()>();
    tasks.spawn("polite", |stop| stop.wait(LONG).then_some(()).ok_or(String::new())).unwrap();
    tasks
        .spawn("deaf", move |_| {
            let _ = released.recv();
            Ok(())
        })
        .unwrap();
    tasks.request_stop("enough");
    // No grace time depends on the speed of the machine: the polite task ends first.
    while tasks.running().len() > 1 {
        thread::yield_now();
    }
    let error = tasks.join(Duration::from_millis(1)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot finish the tasks: after 1ms still running are [\"deaf\"]"
    );
    tasks.fail("trainer", "it is broken".to_owned());
    let error = failure_text(tasks.join(Duration::ZERO));
    let text = "task \"trainer\" failed: it is broken; still running are [\"deaf\"]";
    assert!(error.ends_with(text), "{error}");
    assert!(matches!(tasks.spawn("deaf", |_| Ok(())), Err(SpawnError::NameInUse { .. })));
    drop(release);
    assert!(failure_text(tasks.join(LONG)).ends_with("it is broken"));
    tasks.clear_stop();
    assert_eq!(tasks.join(LONG).unwrap(), None);
}

#[test]
fn a_panic_is_a_failure_with_its_text() {
    /// A payload whose destructor panics.
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("in a destructor");
        }
    }
    let panics: [(&str, fn()); 4] = [
        ("a text", || panic!("a text")),
        ("step 7", || panic!("step {}", 7)),
        ("a panic without a text", || std::panic::panic_any(7)),
        ("a panic without a text", || std::panic::panic_any(Bomb)),
    ];
    for (text, panic) in panics {
        let tasks = Tasks::<String>::new();
        tasks
            .spawn("evaluator", move |_| {
                panic();
                Ok(())
            })
            .unwrap();
        let expected = format!("cannot finish the tasks: task \"evaluator\" panicked: {text}");
        assert_eq!(failure_text(tasks.join(LONG)), expected);
    }
}

#[test]
fn a_cleared_group_can_be_used_again() {
    let tasks = Tasks::<String>::new();
    tasks.spawn("reader", |_| Err("broken".to_owned())).unwrap();
    assert!(tasks.join(LONG).is_err());
    tasks.clear_stop();
    assert!(!tasks.should_stop());
    tasks.spawn("reader", |_| Ok(())).unwrap();
    assert_eq!(tasks.join(LONG).unwrap(), None);
}

#[test]
fn dropping_the_group_stops_its_tasks() {
    let tasks = Tasks::<String>::new();
    let (sender, receiver) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    tasks
        .spawn("deaf", move |stop| {
            // The group is dropped while this task runs.
            let _ = released.recv();
            sender.send(stop.wait(LONG)).map_err(|error| error.to_string())
        })
        .unwrap();
    drop(tasks);
    drop(release);
    assert_eq!(receiver.recv_timeout(LONG), Ok(true));
}

#[test]
fn what_a_task_owns_is_dropped_before_it_counts_as_ended() {
    let tasks = Tasks::<String>::new();
    let owned = Arc::new(());
    let held = owned.clone();
    tasks
        .spawn("owner", move |_| {
            let _held = &held;
            Ok(())
        })
        .unwrap();
    tasks.join(LONG).unwrap();
    assert_eq!(Arc::strong_count(&owned), 1);
}

#[test]
fn names_must_be_names() {
    let tasks = Tasks::<String>::new();
    for name in ["", "a\0b"] {
        let error = tasks.spawn(name, |_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot start a task: {name:?} is no name"));
    }
    assert!(tasks.running().is_empty());
}
