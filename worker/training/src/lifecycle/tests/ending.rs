//! The end: who is waited for, and which values it has.

use super::*;

/// Returns the events after the last push or token, joined by spaces.
fn ending(played: &Played) -> String {
    let is_step = |event: &String| matches!(event.as_str(), "push" | "token" | "a.before_step");
    let last = played.events.iter().rposition(is_step).unwrap();
    played.events[last + 1..].join(" ")
}

/// A training of two steps that a hook ends after `stops_after`, if any.
fn script(stops_after: Option<u64>) -> (Script, Vec<Box<dyn Hook>>) {
    let script = saving(100, 2);
    let mut hooks = vec![Recorder::boxed("a", &script.log)];
    if let Some(step) = stops_after {
        hooks.push(Box::new(crate::hooks::StopAtStep::last(step)));
    }
    (script, hooks)
}

const AWAITED: &str = "await end refresh save at 2 a.saved a.end leave";

// T-9.
#[test]
fn a_training_that_ends_for_all_waits_for_the_others_before_it_pulls_the_values() {
    for (fault, is_final, expected) in [
        (None, true, AWAITED),
        // The end is the end, whichever worker is missing, and whether or not the servers are still
        // there.
        (Some("await end"), false, AWAITED),
        (Some("refresh"), false, AWAITED),
    ] {
        let (mut script, hooks) = script(None);
        script.faults = fault.map(|place| (place, 1, busy())).into_iter().collect();
        let played = script.play(hooks);
        assert_eq!(ending(&played), expected, "{fault:?}");
        let ended = played.ended.unwrap();
        assert_eq!((ended.is_final, ended.params.unwrap().step()), (is_final, 2), "{fault:?}");
    }
}

// T-9.
#[test]
fn a_worker_that_ends_alone_waits_for_nobody() {
    let (script, hooks) = script(Some(1));
    let played = script.play(hooks);
    assert_eq!(ending(&played), "a.after_step refresh save at 1 a.saved a.end leave");
    assert!(!played.ended.unwrap().is_final);
}

const FINISHED: &str = "await end refresh save at 1 a.saved a.end leave";

#[test]
fn the_chief_finishes_the_training_for_all_before_it_waits_for_the_others() {
    let tried = |error: Error| format!("finish a.hears of {error} a.retrying ");
    for (fault, is_final, expected) in [
        (None, true, format!("finish {FINISHED}")),
        // The second try succeeds, after a pause.
        (Some(busy()), true, format!("{}finish {FINISHED}", tried(busy()))),
        (
            Some(lost()),
            true,
            format!("{}join a.rejoins 1 -> 1 a.joined finish {FINISHED}", tried(lost())),
        ),
        // The others do not hear of it, so they go on.
        (Some(Error::Fenced), false, "finish refresh save at 1 a.saved a.end leave".to_owned()),
    ] {
        let (mut script, hooks) = script(Some(1));
        script.settings.finish_for_all = true;
        let faults = fault.clone().map(|error| ("finish", 1, error));
        script.faults = faults.into_iter().collect();
        let played = script.play(hooks);
        assert_eq!(ending(&played), format!("a.after_step {expected}"), "{fault:?}");
        assert_eq!(played.ended.unwrap().is_final, is_final, "{fault:?}");
    }
}

#[test]
fn a_chief_that_cannot_finish_the_training_gives_up_after_its_time() {
    let failing = || {
        let (mut script, hooks) = script(Some(1));
        script.settings.finish_for_all = true;
        script.faults = (1..200).map(|call| ("finish", call, timeout(None))).collect();
        (script, hooks)
    };
    let (training, hooks) = failing();
    let played = training.play(hooks);
    assert!(matches!(played.ended, Err(TrainingError::GaveUp { .. })), "{:?}", played.events);
    assert!(played.now <= Duration::from_secs(61), "{:?}", played.now);

    // An interrupt ends the attempts.
    let (training, hooks) = failing();
    let at = Duration::from_secs(3);
    let played = Script { interrupt_at: Some(at), ..training }.play(hooks);
    assert_eq!((played.now, played.ended.unwrap().is_final), (at, false));

    // The last step has ended the training for all, with or without the chief.
    let (mut training, hooks) = script(None);
    training.settings.finish_for_all = true;
    training.faults = vec![("finish", 1, busy())];
    let played = training.play(hooks);
    assert_eq!((played.count("finish"), played.ended.unwrap().is_final), (1, true));
}

// T-8.
#[test]
fn an_interrupted_chief_finishes_the_training_and_waits_for_nobody() {
    let (mut script, hooks) = script(None);
    script.settings.finish_for_all = true;
    script.interrupt_at = Some(Duration::from_secs(1));
    let played = script.play(hooks);
    assert_eq!(ending(&played), "a.after_step finish save at 1 a.saved a.end leave");
    assert!(!played.ended.unwrap().is_final);
}

#[test]
fn only_the_chief_finishes_the_training_and_only_at_a_clean_end() {
    for (is_chief, fails_at, finishes) in [(true, None, 1), (false, None, 0), (true, Some(1), 0)] {
        let mut script = Script { last_step: 2, fails_at, ..Script::default() };
        script.settings.finish_for_all = true;
        script.settings.is_chief = is_chief;
        let played = script.play(Vec::new());
        assert_eq!((played.count("finish"), played.count("leave")), (finishes, 1));
    }
}

/// The servers have lost the last step before it was saved, so the training has not ended.
#[test]
fn a_server_that_is_lost_at_the_end_may_have_gone_back() {
    for (is_chief, place, call) in [
        (true, "save", 2),
        (true, "await end", 1),
        (true, "refresh", 1),
        (false, "await end", 1),
        (false, "refresh", 1),
    ] {
        let (mut script, hooks) = script(None);
        script.settings.is_chief = is_chief;
        script.faults = vec![(place, call, lost())];
        script.joins = [Ok((0, false)), Ok((1, true))].into();
        let played = script.play(hooks);
        assert_eq!(played.count("push"), 3, "{place}: {:?}", played.events);
        assert_eq!(played.count(&format!("a.hears of {}", lost())), 1, "{place}");
        let expected = match is_chief {
            true => AWAITED,
            false => "await end refresh a.end leave",
        };
        assert_eq!(ending(&played), expected, "{place}");
        let ended = played.ended.unwrap();
        let values = ended.params.unwrap().step();
        assert_eq!((ended.is_final, ended.step, values), (true, 2, 2), "{place}");
        assert_eq!(ended.reason, StopReason::LastStep, "{place}");
    }
}

/// The servers still have the last step after a restart.
// T-2, T-6.
#[test]
fn a_join_after_the_end_asks_whether_the_training_goes_on() {
    let (mut script, hooks) = script(None);
    script.faults = vec![("await end", 1, lost())];
    let played = script.play(hooks);
    assert_eq!((played.count("push"), played.count("token")), (2, 4), "{:?}", played.events);
    let ended = played.ended.unwrap();
    assert_eq!((ended.is_final, ended.step, ended.reason), (true, 2, StopReason::LastStep));
}

/// A final checkpoint that was asked for in vain is no final one of the training that goes on.
#[test]
fn a_training_that_goes_on_saves_its_own_final_checkpoint() {
    let mut script = saving(2, 5);
    // The final checkpoint of step 5, which is the fourth.
    script.faults = vec![("save", 4, lost())];
    script.joins = [Ok((0, false)), Ok((2, true))].into();
    let played = script.play(Vec::new());
    assert_eq!(played.saved(), [0, 2, 4, 5, 4, 5]);
    assert_eq!(played.ended.unwrap().checkpoint.unwrap().step, 5);
}

// T-6.
#[test]
fn a_reason_of_this_worker_survives_a_restore() {
    let mut ending = Ending::default();
    ending.stop(StopReason::LastStep);
    ending.stop(StopReason::Closed);
    assert_eq!(ending.reason, Some(StopReason::LastStep));
    ending.joined();
    assert_eq!(ending.reason, Some(StopReason::Closed));
    ending.stop(StopReason::Interrupted);
    ending.joined();
    assert_eq!((ending.reason, ending.is_interrupted), (Some(StopReason::Closed), true));

    // A worker that ends alone asks nothing more of servers that have gone back.
    let (mut script, hooks) = script(Some(1));
    script.settings.is_chief = false;
    script.faults = vec![("refresh", 1, lost())];
    let played = script.play(hooks);
    assert_eq!((played.count("join"), played.ended.unwrap().is_final), (1, false));
}
