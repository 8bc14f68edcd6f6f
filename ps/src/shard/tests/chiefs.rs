//! At most one chief: it holds a lease on the step owner, and every shard fences older chiefs.

use std::time::Duration;

use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::message::{self, Operation, Role};
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_optim::optimizer::Sgd;
use pushpull_store::planted::PlantedBugs;

use super::peers::{Peer, Push, bytes_of, chief, variables, worker};
use super::synchronous::ShardCluster;
use super::world::{ConnectionId, World};
use crate::config::{Mode, PsConfig};
use crate::shard::{ShardInput, TICK};

const LEASE: Duration = Duration::from_secs(5);

/// Two shards with nothing declared, a chief connected to both, and another task with the role of
/// a chief.
fn world(planted: PlantedBugs) -> (World, Peer, [ConnectionId; 2], Peer) {
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
fn a_replaced_chief_is_fenced() {
    an_older_chief_is_fenced(PlantedBugs::default());
}

pub(super) fn an_older_chief_is_fenced(planted: PlantedBugs) {
    let (mut world, _, lines, mut second) = world(planted);
    let catalogue = world.catalogue.clone();
    lines.iter().for_each(|&line| _ = world.declare(line, &catalogue));
    // The lease ends on the step owner only; the other shard still receives heartbeats.
    world.pass(LEASE + 2 * TICK, &[lines[1]]);
    world.join(0, &mut second);
    let fresh = [world.join(1, &mut second)];
    let old = lines[1];
    let name = pushpull_common::protocol::wire::Text::clipped("ckpt");
    let epoch = RestoreEpoch(1);
    let step = 0.into();
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
    let Message::Refused(refused) = answer else {
        panic!("an initial value is accepted: {answer:?}")
    };
    assert!(is_fenced(&refused.refusal, &second), "{}", refused.refusal);
    for other in [assign.shared(&[(0, 16)], Some(16)), assign.encoded(1, 4, 0, Some(8))] {
        let name = other.name();
        let refusal = world.refused(old, other);
        assert!(is_fenced(&refusal, &second), "{name}: {refusal}");
    }
    let message::Declared { state, .. } = match world.declare(fresh[0], &catalogue) {
        Message::Declared(declared) => declared,
        other => panic!("{other:?}"),
    };
    let digest = catalogue.digest();
    assert_eq!(state, message::CatalogueState::Declared { digest }, "nothing is initialized");
}

#[test]
fn a_half_sent_declaration_of_an_older_chief_is_refused() {
    let (mut world, _, lines, mut second) = world(PlantedBugs::default());
    let catalogue = world.catalogue.clone();
    let digest = catalogue.digest();
    let body = catalogue.encode();
    let envelope = Envelope::default();
    let request =
        world.announce(lines[1], envelope, message::Declare { digest }.into(), body.len());
    world.ask(lines[0], message::Leave {}.into());
    world.join(0, &mut second);
    world.join(1, &mut second);
    world.body(lines[1], body);
    let Some(Message::Refused(refused)) = world.answer(lines[1], request) else {
        panic!("the declaration is accepted")
    };
    assert!(is_fenced(&refused.refusal, &second), "{}", refused.refusal);
}

#[test]
fn a_chief_keeps_its_role_until_its_lease_ends() {
    for leaves in [false, true] {
        let (mut world, mut first, lines, mut second) = world(PlantedBugs::default());
        let Err(Refusal::Busy { what, limit: 1 }) = world.try_join(0, &mut second) else {
            panic!("a second chief is accepted")
        };
        let said = what.to_string();
        assert!(said.starts_with("chiefs (the chief is /job:worker/task:0 (heard from"), "{said}");
        // The chief may reconnect, as the same process or as a new one.
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
        // It may still join as a worker.
        let mut worker = Peer { role: Role::Worker {}, ..restarted.restarted() };
        world.join(0, &mut worker);
    }
}

#[test]
fn a_restarted_shard_still_fences_older_chiefs() {
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

/// Tries to join as the chief, and returns the refusal.
fn refused_as_chief(world: &mut World, shard: usize, peer: &Peer) -> Refusal {
    let mut peer = Peer { role: Role::Chief {}, ..peer.clone() };
    world.try_join(shard, &mut peer).unwrap_err()
}

fn is_wrong_role(refusal: &Refusal, role: Role) -> bool {
    *refusal == Refusal::Role { role: role.code(), kind: 1 }
}

/// A present worker says hello again as chief, with its own incarnation and with its epoch or none.
#[test]
fn a_worker_cannot_become_the_chief_under_its_epoch() {
    for restarts in [false, true] {
        // The worker received its epoch before the chief, or after it.
        for older in [false, true] {
            let configure = |config: PsConfig| config.shards(2).lease(LEASE);
            let mut world = World::bare(variables(), Sgd::new(1.0), configure);
            let mut first = chief();
            let mut worker = worker(7);
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
                // The chief continues over another connection.
                let line = world.join(shard, &mut first);
                let catalogue = world.catalogue.clone();
                let declared = world.declare(line, &catalogue);
                assert!(matches!(declared, Message::Declared(_)), "{declared:?}");
                // The worker continues as a worker.
                world.join(shard, &mut worker);
            }
        }
    }
}

#[test]
fn the_chief_cannot_become_a_worker_under_its_epoch() {
    let (mut world, first, _, _) = world(PlantedBugs::default());
    for shard in [0, 1] {
        for epoch in [first.epoch, 0.into()] {
            let mut worker = Peer { role: Role::Worker {}, epoch, ..first.clone() };
            let refusal = world.try_join(shard, &mut worker).unwrap_err();
            assert!(is_wrong_role(&refusal, Role::Worker {}), "{refusal}");
        }
    }
}

/// While a chief is alive, another task names the chief's epoch, a higher one, or an older one.
#[test]
fn no_epoch_that_a_task_names_makes_it_a_second_chief() {
    let (mut world, mut first, _, second) = world(PlantedBugs::default());
    let mut restarted = first.restarted();
    [0, 1].into_iter().for_each(|shard| _ = world.join(shard, &mut restarted));
    // The epoch of the chief's previous incarnation.
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
    // A shard that mints no epochs refuses a worker with the chief's epoch as chief, before and
    // after a restart.
    let mut liar = Peer { epoch: first.epoch, ..worker(8) };
    world.join(1, &mut liar);
    let refusal = refused_as_chief(&mut world, 1, &liar);
    assert!(is_wrong_role(&refusal, Role::Chief {}), "{refusal}");
    world.restart(1).unwrap();
    let refusal = refused_as_chief(&mut world, 1, &liar);
    assert!(is_wrong_role(&refusal, Role::Chief {}), "{refusal}");
    world.join(1, &mut first);
}

/// The chief leaves, and the step owner gives the next one a higher epoch than all before.
#[test]
fn the_next_chief_has_an_epoch_above_all_others() {
    let (mut world, first, lines, mut second) = world(PlantedBugs::default());
    let mut others: Vec<Peer> = (1..4).map(worker).collect();
    others.iter_mut().for_each(|other| _ = world.join(0, other));
    world.ask(lines[0], message::Leave {}.into());
    // Without a chief, a worker is still refused as chief under its epoch.
    let refusal = refused_as_chief(&mut world, 0, &others[0]);
    assert!(is_wrong_role(&refusal, Role::Chief {}), "{refusal}");
    world.join(0, &mut second);
    let newest = others.iter().map(|other| other.epoch).max().unwrap();
    assert!(second.epoch > newest && second.epoch > first.epoch);
    // The chief that has left is fenced, because it was replaced.
    let refusal = refused_as_chief(&mut world, 0, &first);
    assert!(is_fenced(&refusal, &second), "{refusal}");
}

#[test]
fn a_shard_linked_to_the_step_owner_refuses_chiefs_unknown_to_it() {
    let mut cluster = ShardCluster::new(2, Mode::default(), |config| config.lease(LEASE));
    // A task of the cluster that was never started names an epoch that was never minted.
    let claimed_epoch = cluster.replicas[0].peer.epoch.0 + 100;
    let mut liar = Peer { role: Role::Chief {}, epoch: claimed_epoch.into(), ..worker(9) };
    let refusal = cluster.world.try_join(1, &mut liar).unwrap_err();
    let Refusal::Busy { what, .. } = &refusal else { panic!("{refusal}") };
    let said = format!("chiefs (the step owner has announced none with epoch {claimed_epoch})");
    assert_eq!(what.as_str(), said);
    // The chief keeps its role on this shard and on the step owner.
    let line = cluster.replicas[0].lines[1];
    let catalogue = cluster.world.catalogue.clone();
    let answer = cluster.world.declare(line, &catalogue);
    assert!(matches!(answer, Message::Declared(_)), "{answer:?}");
    // The step owner announces the next chief before it connects here.
    cluster.leave(0);
    let mut next = Peer { role: Role::Chief {}, ..worker(7) };
    cluster.world.join(0, &mut next);
    cluster.settle();
    // The previous chief is fenced from then on.
    let old = cluster.replicas[0].peer.clone();
    let line = cluster.world.join(1, &mut old.clone());
    let initialize = message::Initialize { epoch: RestoreEpoch(9) };
    let refusal = cluster.world.refused(line, initialize.into());
    assert!(is_fenced(&refusal, &next), "{refusal}");
    cluster.world.join(1, &mut next);
    // Without a connection to the step owner, the shard cannot check the epoch.
    let link = cluster.links[1].take().unwrap();
    cluster.world.disconnect(link);
    cluster.world.input(1, ShardInput::OwnerLink { up: false });
    cluster.world.join(1, &mut liar);
}
