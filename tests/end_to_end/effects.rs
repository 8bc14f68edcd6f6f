//! Effects of a coordinator count once, over real sockets and across restarts of a server.

use pushpull::blocking::Worker;
use pushpull::protocol::{EffectNumber, EffectRef, Refusal, Settlement};
use pushpull::worker::OpenedCoordinator;
use pushpull::{Error, Params, Push};

use crate::cluster::{TestCluster, vector};
use crate::restart::RestartedServer;

/// Takes a token, and pushes ones for an effect.
fn push(worker: &mut Worker, effect: EffectRef) -> Result<Push, Error> {
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("a").unwrap().fill(1.0);
    gradients.view_mut::<f32>("b").unwrap().fill(1.0);
    worker.push_for_effect(token, gradients, effect)
}

fn effect(opened: &OpenedCoordinator, number: u64) -> EffectRef {
    opened.effect(number, EffectNumber(0), 0)
}

/// Returns the sums of all gradients that the shards of both variables have applied.
fn values(worker: &mut Worker, params: &mut Params) -> [f32; 2] {
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    ["a", "b"].map(|name| params.view::<f32>(name).unwrap()[0])
}

fn is_settled(opened: &OpenedCoordinator, number: u64) -> bool {
    opened.window.state(EffectNumber(number)) == Settlement::Settled
}

#[test]
fn an_effect_that_two_workers_push_counts_once_across_restarts() {
    // Two shards on one server, with Adam: another gradient would change the values.
    let mut server = RestartedServer::start();
    let variables = [vector("a", 300_000), vector("b", 7)];
    let mut first = server.worker(0);
    let mut second = server.worker(1);
    let mut params = first.join(&variables, |_| ()).unwrap();
    second.join(&variables, |_| ()).unwrap();
    let opened = first.open_coordinator("trainer").unwrap();
    assert_eq!((opened.window.settled(), opened.window.bits()), (EffectNumber(0), 0));

    assert_eq!(
        push(&mut first, effect(&opened, 2)).unwrap(),
        Push::Applied { step: 1, staleness: 0 }
    );
    let after = values(&mut first, &mut params);
    server.restart();
    assert_eq!(push(&mut second, effect(&opened, 2)).unwrap(), Push::Repeated);
    assert_eq!(values(&mut first, &mut params), after);
    let found = second.settled_effects("trainer").unwrap();
    assert_eq!((is_settled(&found, 1), is_settled(&found, 2)), (false, true));

    // Another coordinator takes over, and fences the executions that the first has scheduled.
    let resumed = second.open_coordinator("trainer").unwrap();
    assert!(resumed.coordinator == opened.coordinator && resumed.epoch > opened.epoch);
    assert_eq!(resumed.window, found.window);
    server.restart();
    match push(&mut first, effect(&opened, 1)) {
        Err(Error::Refused {
            refusal: Refusal::CoordinatorEpoch { epoch, current, .. }, ..
        }) => {
            assert_eq!((epoch, current), (opened.epoch, resumed.epoch));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(values(&mut first, &mut params), after);
    assert!(matches!(push(&mut first, effect(&resumed, 1)), Ok(Push::Applied { step: 2, .. })));
    let found = first.settled_effects("trainer").unwrap();
    assert_eq!((found.window.settled(), found.window.bits()), (EffectNumber(2), 0));

    second.close_coordinator("trainer", resumed.epoch).unwrap();
    let refused = push(&mut first, effect(&resumed, 3)).unwrap_err();
    let unknown = Refusal::UnknownCoordinator { coordinator: resumed.coordinator };
    assert!(matches!(&refused, Error::Refused { refusal, .. } if *refusal == unknown), "{refused}");
    let metrics = server.ps.as_ref().unwrap().handle().metrics();
    assert_eq!(metrics.global_step, 2);
    first.leave().unwrap();
    second.leave().unwrap();
    server.stop();
}

#[test]
fn workers_that_push_the_same_effects_at_once_count_each_once_on_every_shard() {
    const EFFECTS: u64 = 40;
    let cluster = TestCluster::sgd_of(2, 3, |config| config.shards(2));
    let variables = [vector("a", 40_000), vector("b", 7)];
    let mut coordinator = cluster.worker(0);
    let mut params = coordinator.join(&variables, |_| ()).unwrap();
    let opened = coordinator.open_coordinator("trainer").unwrap();
    let mut outcomes = Vec::new();
    std::thread::scope(|scope| {
        let runs = [1, 2].map(|index| {
            let mut worker = cluster.worker(index);
            let variables = &variables;
            scope.spawn(move || {
                worker.join(variables, |_| ()).unwrap();
                let numbers = 1..=EFFECTS;
                let pushes =
                    numbers.map(|number| push(&mut worker, effect(&opened, number)).unwrap());
                let counted = pushes.filter(|push| matches!(push, Push::Applied { .. })).count();
                worker.leave().unwrap();
                counted
            })
        });
        outcomes.extend(runs.map(|run| run.join().unwrap()));
    });
    assert_eq!(outcomes.iter().sum::<usize>() as u64, EFFECTS, "{outcomes:?}");
    assert_eq!(values(&mut coordinator, &mut params), [-(EFFECTS as f32); 2]);
    let found = coordinator.settled_effects("trainer").unwrap();
    assert_eq!((found.window.settled(), found.window.bits()), (EffectNumber(EFFECTS), 0));
    assert_eq!(cluster.handle().metrics().global_step, EFFECTS);
    coordinator.close_coordinator("trainer", opened.epoch).unwrap();
    coordinator.leave().unwrap();
    cluster.stop();
}

#[test]
fn a_name_that_no_coordinator_can_have_is_refused() {
    let cluster = TestCluster::sgd(1, |config| config);
    let mut worker = cluster.worker(0);
    assert!(matches!(worker.open_coordinator("trainer"), Err(Error::NotJoined { .. })));
    worker.join(&[vector("a", 3)], |_| ()).unwrap();
    for name in ["", &"x".repeat(65)] {
        let error = worker.open_coordinator(name).unwrap_err().to_string();
        assert!(error.contains("1 to 64 bytes"), "{error}");
    }
    assert!(worker.open_coordinator(&"x".repeat(64)).is_ok());
    worker.leave().unwrap();
    cluster.stop();
}
