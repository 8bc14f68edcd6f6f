//! One chief at a time: a lease on the step owner, a fence on every shard.

use std::time::Duration;

use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::message::{self, Operation, Role};
use pushpull_common::protocol::{Envelope, Message, Refusal};

use super::peers::{Peer, Push, bytes_of, chief, variables, worker};
use super::synchronous::Cluster;
use super::world::{Line, World};
use crate::aggregate::mode::Mode;
use crate::config::PsConfig;
use crate::optimizer::Sgd;
use crate::planted::PlantedBugs;
use crate::shard::{Input, TICK};

const LEASE: Duration = Duration::from_secs(5);

/// Two shards, with nothing declared; a chief with a line to each, and another task that would be.
fn world(planted: PlantedBugs) -> (World, Peer, [Line; 2], Peer) {
    let configure = |config: PsConfig| PsConfig { planted, ..config.shards(2).lease(LEASE) };
    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let mut first = chief();
    let lines = [0, 1].map(|shard| world.join(shard, &mut first));
    (world, first, lines, Peer { role: Role::Chief {}, ..worker(7) })
}

fn is_fenced(refusal: &Refusal, by: &Peer) -> bool {
    matches!(refusal, Refusal::Fenced { current, .. } if *current == by.epoch)
}

#[test]
fn a_chief_that_was_replaced_does_nothing_more() {
    an_older_chief_is_fenced(PlantedBugs::default());
}

pub(super) fn an_older_chief_is_fenced(planted: PlantedBugs) {
    let (mut world, _, lines, mut second) = world(planted);
    let catalogue = world.catalogue.clone();
    lines.iter().for_each(|&line| _ = world.declare(line, &catalogue));
    // The step owner has lost it; the other shard still hears it.
    world.pass(LEASE + 2 * TICK, &[lines[1]]);
    world.join(0, &mut second);
    let fresh = [world.join(1, &mut second)];
    let old = lines[1];
    let name = pushpull_common::protocol::wire::Text::clipped("ckpt");
    let (epoch, step) = (RestoreEpoch(1), 0.into());
    let checkpoint = message::CheckpointId { name, epoch: RestoreEpoch(0), step };
    let asked: [Message; 4] = [
        message::Initialize { epoch }.into(),
        message::Restore { checkpoint, epoch }.into(),
        message::Declare { digest: catalogue.digest() }.into(),
        message::Finish {}.into(),
    ];
    for message in asked {
        let name = message.name();
        let refusal = world.refused(old, message);
        assert!(is_fenced(&refusal, &second), "{name}: {refusal}");
    }
    let push_slot = world.push_slot(old);
    let assign = Push::plain(1, Operation::Assign {}, push_slot);
    let answer = world.push_answer(old, &assign, &[(0, &bytes_of(&[1.0_f64, 1.0]))]);
    let Message::Refused(refused) = answer else { panic!("a first value is taken: {answer:?}") };
    assert!(is_fenced(&refused.refusal, &second), "{}", refused.refusal);
    for other in [assign.shared(&[(0, 16)], Some(16)), assign.encoded((1, 4), 0, Some(8))] {
        let name = other.name();
        let refusal = world.refused(old, other);
        assert!(is_fenced(&refusal, &second), "{name}: {refusal}");
    }
    let message::Declared { state, .. } = match world.declare(fresh[0], &catalogue) {
        Message::Declared(declared) => declared,
        other => panic!("{other:?}"),
    };
    let digest = catalogue.digest();
    assert_eq!(state, message::CatalogueState::Declared { digest }, "nothing was initialized");
}

#[test]
fn what_an_older_chief_has_half_sent_comes_to_nothing() {
    let (mut world, _, lines, mut second) = world(PlantedBugs::default());
    let catalogue = world.catalogue.clone();
    let (digest, body) = (catalogue.digest(), catalogue.encode());
    let envelope = Envelope::default();
    let request =
        world.announce(lines[1], envelope, message::Declare { digest }.into(), body.len());
    world.ask(lines[0], message::Leave {}.into());
    world.join(0, &mut second);
    world.join(1, &mut second);
    world.body(lines[1], body);
    let Some(Message::Refused(refused)) = world.answer(lines[1], request) else {
        panic!("it is taken")
    };
    assert!(is_fenced(&refused.refusal, &second), "{}", refused.refusal);
}

#[test]
fn there_is_one_chief_for_as_long_as_its_lease_runs() {
    for leaves in [false, true] {
        let (mut world, mut first, lines, mut second) = world(PlantedBugs::default());
        let Err(Refusal::Busy { what, limit: 1 }) = world.try_join(0, &mut second) else {
            panic!("there are two")
        };
        let said = what.to_string();
        assert!(said.starts_with("chiefs, which is /job:worker/task:0 (heard from"), "{said}");
        // It itself may come again, over another connection or as another process.
        world.join(0, &mut first);
        let mut restarted = first.restarted();
        let line = world.join(0, &mut restarted);
        match leaves {
            true => _ = world.ask(line, message::Leave {}.into()),
            false => world.pass(LEASE + 2 * TICK, &[lines[1]]),
        }
        world.join(0, &mut second);
        assert!(second.epoch > restarted.epoch);
        let refusal = world.try_join(0, &mut restarted).unwrap_err();
        assert!(is_fenced(&refusal, &second), "{refusal}");
        // A worker it may still be.
        let mut worker = Peer { role: Role::Worker {}, ..restarted.restarted() };
        world.join(0, &mut worker);
    }
}

#[test]
fn a_restart_of_a_shard_lets_no_older_chief_in() {
    let (mut world, mut first, _, mut second) = world(PlantedBugs::default());
    world.pass(LEASE + 2 * TICK, &[]);
    world.join(0, &mut second);
    world.join(1, &mut second);
    for shard in [0, 1] {
        world.restart(shard).unwrap();
        let refusal = world.try_join(shard, &mut first).unwrap_err();
        assert!(is_fenced(&refusal, &second), "{refusal}");
        world.join(shard, &mut second);
    }
}

/// Tries to come in as the chief; what it is refused with.
fn refused_as_chief(world: &mut World, shard: usize, peer: &Peer) -> Refusal {
    let mut peer = Peer { role: Role::Chief {}, ..peer.clone() };
    world.try_join(shard, &mut peer).unwrap_err()
}

fn is_wrong_role(refusal: &Refusal, role: Role) -> bool {
    *refusal == Refusal::Role { role: role.code(), kind: 1 }
}

/// A worker that is there says hello again, with its own incarnation, and its epoch or none.
#[test]
fn a_worker_does_not_become_the_chief_under_the_epoch_that_it_has() {
    for restarts in [false, true] {
        // The worker was given its epoch before the chief, or after it.
        for older in [false, true] {
            let configure = |config: PsConfig| config.shards(2).lease(LEASE);
            let mut world = World::bare(variables(), Sgd::new(1.0), configure);
            let (mut first, mut worker) = (chief(), worker(7));
            for shard in [0, 1] {
                if older {
                    world.join(shard, &mut worker);
                }
                world.join(shard, &mut first);
                if !older {
                    world.join(shard, &mut worker);
                }
            }
            assert_eq!(worker.epoch < first.epoch, older);
            if restarts {
                [0, 1].into_iter().for_each(|shard| world.restart(shard).unwrap());
            }
            for shard in [0, 1] {
                for epoch in [worker.epoch, 0.into()] {
                    let refusal =
                        refused_as_chief(&mut world, shard, &Peer { epoch, ..worker.clone() });
                    let right = match older {
                        true => is_fenced(&refusal, &first),
                        false => is_wrong_role(&refusal, Role::Chief {}),
                    };
                    assert!(right, "{refusal}");
                }
                // The chief goes on, over another connection.
                let line = world.join(shard, &mut first);
                let catalogue = world.catalogue.clone();
                let declared = world.declare(line, &catalogue);
                assert!(matches!(declared, Message::Declared(_)), "{declared:?}");
                // And the worker as a worker.
                world.join(shard, &mut worker);
            }
        }
    }
}

#[test]
fn the_chief_does_not_become_a_worker_under_the_epoch_that_it_has() {
    let (mut world, first, _, _) = world(PlantedBugs::default());
    for shard in [0, 1] {
        for epoch in [first.epoch, 0.into()] {
            let mut worker = Peer { role: Role::Worker {}, epoch, ..first.clone() };
            let refusal = world.try_join(shard, &mut worker).unwrap_err();
            assert!(is_wrong_role(&refusal, Role::Worker {}), "{refusal}");
        }
    }
}

/// Beside a living chief another task names an epoch: the chief's, a higher one, or an old one.
#[test]
fn no_epoch_that_a_task_names_makes_it_the_chief_beside_a_living_one() {
    let (mut world, mut first, _, second) = world(PlantedBugs::default());
    let mut restarted = first.restarted();
    [0, 1].into_iter().for_each(|shard| _ = world.join(shard, &mut restarted));
    // Its older self, and what that was given.
    let old = first.epoch;
    first = restarted;
    let named = |epoch| Peer { epoch, ..second.clone() };
    for epoch in [old, first.epoch] {
        for shard in [0, 1] {
            let refusal = refused_as_chief(&mut world, shard, &named(epoch));
            assert!(is_fenced(&refusal, &first), "{epoch} at {shard}: {refusal}");
        }
    }
    for epoch in [first.epoch.0 + 1, 1 << 40, u64::MAX] {
        let refusal = refused_as_chief(&mut world, 0, &named(epoch.into()));
        let kept = matches!(refusal, Refusal::Busy { .. } | Refusal::UnknownEpoch { .. });
        assert!(kept, "{epoch}: {refusal}");
    }
    // Nor is a worker that has the chief's epoch where none is minted, before and after a restart.
    let mut liar = Peer { epoch: first.epoch, ..worker(8) };
    world.join(1, &mut liar);
    let refusal = refused_as_chief(&mut world, 1, &liar);
    assert!(is_wrong_role(&refusal, Role::Chief {}), "{refusal}");
    world.restart(1).unwrap();
    let refusal = refused_as_chief(&mut world, 1, &liar);
    assert!(is_wrong_role(&refusal, Role::Chief {}), "{refusal}");
    world.join(1, &mut first);
}

/// The step owner finds that the chief is gone; the next is given a higher epoch than all before.
#[test]
fn who_follows_a_chief_that_is_gone_is_given_an_epoch_above_all_others() {
    let (mut world, first, lines, mut second) = world(PlantedBugs::default());
    let mut others: Vec<Peer> = (1..4).map(worker).collect();
    others.iter_mut().for_each(|other| _ = world.join(0, other));
    world.ask(lines[0], message::Leave {}.into());
    // Not under an epoch that it has as a worker, though nobody is there.
    let refusal = refused_as_chief(&mut world, 0, &others[0]);
    assert!(is_wrong_role(&refusal, Role::Chief {}), "{refusal}");
    world.join(0, &mut second);
    let newest = others.iter().map(|other| other.epoch).max().unwrap();
    assert!(second.epoch > newest && second.epoch > first.epoch);
    // The one that has left comes again as what it is now: one that was replaced.
    let refusal = refused_as_chief(&mut world, 0, &first);
    assert!(is_fenced(&refusal, &second), "{refusal}");
}

#[test]
fn a_shard_that_has_the_owners_word_takes_no_chief_that_the_owner_does_not_know() {
    let mut cluster = Cluster::new(2, Mode::Asynchronous, |config| config.lease(LEASE));
    // A task that the cluster has and nobody runs names an epoch that nobody was given.
    let lie = cluster.replicas[0].peer.epoch.0 + 100;
    let mut liar = Peer { role: Role::Chief {}, epoch: lie.into(), ..worker(9) };
    let refusal = cluster.world.try_join(1, &mut liar).unwrap_err();
    let Refusal::Busy { what, .. } = &refusal else { panic!("{refusal}") };
    let said = format!("chiefs, as the step owner has told of none with epoch {lie}");
    assert_eq!(what.as_str(), said);
    // The chief is what it was, there and at the owner.
    let line = cluster.replicas[0].lines[1];
    let catalogue = cluster.world.catalogue.clone();
    let answer = cluster.world.declare(line, &catalogue);
    assert!(matches!(answer, Message::Declared(_)), "{answer:?}");
    // The next chief is told of before it comes.
    cluster.leave(0);
    let mut next = Peer { role: Role::Chief {}, ..worker(7) };
    cluster.world.join(0, &mut next);
    cluster.settle();
    // The one before is fenced from then on.
    let old = cluster.replicas[0].peer.clone();
    let line = cluster.world.join(1, &mut old.clone());
    let initialize = message::Initialize { epoch: RestoreEpoch(9) };
    let refusal = cluster.world.refused(line, initialize.into());
    assert!(is_fenced(&refusal, &next), "{refusal}");
    cluster.world.join(1, &mut next);
    // Without a connection to the owner there is nobody to ask.
    let link = cluster.links[1].take().unwrap();
    cluster.world.disconnect(link);
    cluster.world.input(1, Input::OwnerLink { up: false });
    cluster.world.join(1, &mut liar);
}
