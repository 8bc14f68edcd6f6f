//! The schedule of averages and publications of the values that replicas change by themselves.

use super::*;

fn f32(name: &str) -> VariableSpec {
    VariableSpec::f32(name, [1]).unwrap()
}

/// A local variable, and means of every second and of every third step.
pub(super) fn all_kinds() -> Vec<VariableSpec> {
    let means =
        [f32("m").mean_every_steps(2), f32("n").mean_every_steps(3), f32("o").mean_every_steps(2)];
    [f32("w"), f32("s").local()].into_iter().chain(means).collect()
}

/// The events of a script, without those that every training has.
fn events(script: Script) -> Vec<String> {
    let Played { events, .. } = script.play(Vec::new());
    let others = ["join", "push", "leave"];
    events.into_iter().filter(|event| !others.contains(&event.as_str())).collect()
}

/// Means are averaged between a step and the token of the next. Local values are published before
/// each checkpoint, unless the servers have them.
#[test]
fn averages_and_publications_are_made_in_the_recorded_order() {
    let script = Script { variables: all_kinds(), ..saving(4, 5) };
    assert_eq!(
        events(script),
        [
            "save at 0", // right after the join: the servers' values are those of the replica
            "token",
            "token",
            "average 2", //
            "token",
            "average 3", //
            "token",
            "average 4",
            "publish",
            "save at 4", //
            "token",
            "token",
            "await end",
            "refresh",
            "publish", // once the other replicas have ended
            "save at 5",
        ]
    );
}

#[test]
fn only_variables_that_replicas_change_cost_an_action() {
    let cases = [
        (vec![f32("w"), f32("plain").plain()], true, 0, 0),
        // Without checkpoints, too: readers have the final values.
        (vec![f32("s").local()], true, 0, 1),
        (vec![f32("s").local()], false, 0, 0),
        (vec![f32("m").mean_every_steps(2)], true, 3, 0),
        (vec![f32("m").mean_every_steps(2)], false, 3, 0),
        (vec![f32("m").mean_every_steps(7)], true, 0, 0),
        (vec![f32("m").mean_every_steps(1)], true, 6, 0),
    ];
    for (variables, is_chief, averages, publications) in cases {
        let mut script = Script { variables: variables.clone(), ..Script::default() };
        script.last_step = 6;
        script.settings.is_chief = is_chief;
        let events = events(script);
        let count = |kind| events.iter().filter(|event| event.starts_with(kind)).count();
        let counted = (count("average"), count("publish"));
        assert_eq!(counted, (averages, publications), "{variables:?}, chief {is_chief}");
    }
}

/// The average of the last step is made even if that step ends the training.
#[test]
fn a_stop_after_a_step_still_averages() {
    let mut script = Script { variables: vec![f32("m").mean_every_steps(2)], ..Script::default() };
    script.settings.is_chief = false;
    let hooks: Vec<Box<dyn Hook>> = vec![Box::new(crate::hooks::StopAtStep::last(2))];
    let played = script.play(hooks);
    assert_eq!(played.events[played.events.len() - 2..], ["refresh", "leave"]);
    assert_eq!(played.count("average 2"), 1);
}

#[test]
fn a_failure_follows_the_advice_of_its_error() {
    let infinite = Error::NonFinite { variable: "m".to_owned(), element: 0, value: f64::INFINITY };
    // An average at step 2, the only publication at the end; the number of attempts, of joins, and
    // whether the training ends well.
    for (kind, error, attempts, joins, is_ok) in [
        ("average", timeout(Some(3)), 2, 1, true),
        ("publish", timeout(Some(3)), 2, 1, true),
        ("average", busy(), 2, 1, true),
        // The servers' values are taken by the join.
        ("average", lost(), 1, 2, true),
        ("publish", lost(), 2, 2, true),
        ("average", infinite.clone(), 1, 1, false),
        ("publish", infinite, 1, 1, false),
        ("average", Error::Fenced, 1, 1, false),
        ("publish", Error::Fenced, 1, 1, false),
    ] {
        let variables = vec![f32("s").local(), f32("m").mean_every_steps(2)];
        let mut script = Script { variables, last_step: 3, ..Script::default() };
        script.faults.push((kind, 1, error.clone()));
        let played = script.play(Vec::new());
        let tried = played.events.iter().filter(|event| event.starts_with(kind)).count();
        assert_eq!((tried, played.count("join")), (attempts, joins), "{kind}: {error}");
        assert_eq!(played.ended.is_ok(), is_ok, "{kind}: {error}");
        if let Err(ended) = played.ended {
            assert!(matches!(ended, TrainingError::Worker(source) if source == error));
        }
    }
}

#[test]
fn a_replica_that_keeps_its_local_values_publishes_them_after_a_recovery() {
    let mut script = Script { variables: vec![f32("s").local()], ..saving(100, 4) };
    script.faults.push(("token", 3, lost()));
    assert_eq!(
        events(script),
        [
            "save at 0",
            "token",
            "token",
            "token",
            "publish",
            "save at 2", //
            "token",
            "token",
            "token",
            "await end",
            "refresh",
            "publish", // once the other replicas have ended
            "save at 4",
        ]
    );
}

#[test]
fn a_lost_state_is_known_until_the_next_join() {
    let shut = Error::Ended { doing: "push" };
    let rolled_back = Error::RolledBack { from_step: 4, to_step: 2 };
    for (errors, is_lost) in [
        (vec![lost()], true),
        (vec![rolled_back], true),
        (vec![refused(Refusal::NotInitialized {})], true),
        (vec![busy()], false),
        (vec![shut.clone()], false),
        (vec![shut, lost()], true),
    ] {
        let mut lifecycle = Lifecycle::new(Script::default().settings, Vec::new());
        let params = params_for(variables(), 0);
        lifecycle.settings.is_chief = false;
        lifecycle.joined(Duration::ZERO, &params, None).unwrap();
        let mut errors = errors.into_iter();
        lifecycle.operation_failed(Duration::ZERO, errors.next().unwrap()).unwrap();
        errors.for_each(|error| lifecycle.join_failed(Duration::ZERO, error).unwrap());
        assert_eq!(lifecycle.has_lost_state(), is_lost, "{:?}", lifecycle.recovery.cause);
        lifecycle.joined(Duration::ZERO, &params, None).unwrap();
        assert!(!lifecycle.has_lost_state());
    }
}

/// The checkpoint of a failed training is saved, with the local values if the servers take them.
#[test]
fn a_failed_training_saves_once_with_or_without_its_local_values() {
    for fault in [None, Some(busy())] {
        let mut script = Script { variables: all_kinds(), ..saving(100, 9) };
        script.settings.final_checkpoint_on_error = true;
        script.fails_at = Some(2);
        script.faults.extend(fault.map(|error| ("publish", 1, error)));
        let saves = ["save at 0", "token", "token", "average 2", "token", "publish", "save at 2"];
        assert_eq!(events(script), saves);
    }
}

/// An interrupt does not wait for an average, but the final checkpoint has the local values.
// T-8.
#[test]
fn an_interrupted_training_publishes_and_does_not_average() {
    let mut script = Script { variables: all_kinds(), ..saving(100, 9) };
    script.interrupt_at = Some(Duration::from_secs(2));
    let events = events(script);
    assert_eq!(events, ["save at 0", "token", "token", "publish", "save at 2"]);
}

/// A server that does not answer keeps no interrupted training, unless its checkpoint would lack
/// values.
#[test]
fn an_interrupted_training_fails_by_its_publication_only_before_a_checkpoint() {
    let interrupted = Error::Interrupted { doing: "publish" };
    for (settings, is_ok) in [(saving(100, 9).settings, false), (Script::default().settings, true)]
    {
        let mut script = Script { settings, variables: all_kinds(), ..Script::default() };
        script.interrupt_at = Some(Duration::from_secs(2));
        script.faults.push(("publish", 1, interrupted.clone()));
        let played = script.play(Vec::new());
        assert_eq!(played.ended.is_ok(), is_ok, "{:?}", played.events);
        assert_eq!((played.count("publish"), played.count("leave")), (1, 1));
        assert_eq!(played.count("save at 2"), 0);
    }
}
