//! The life of a shard in which everything happens that changes what it keeps, once.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::ids::{RestoreEpoch, Sequence};
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Envelope, Grant, Message};
use pushpull_common::table::{Eviction, TableSpec};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use super::peers::{Push, bytes_of, chief, index_of, place, variables, worker};
use super::world::{Line, Observer, World};
use crate::arena::shelf::Shelf;
use crate::config::PsConfig;
use crate::optimizer::{Adagrad, Lamb, Optimizer, Rules, Sgd};
use crate::planted::PlantedBugs;

/// Three blocks of it.
pub(super) const BLOCK_BYTES: usize = 256;
const LEASE: Duration = Duration::from_millis(400);

/// How it is lived.
#[derive(Clone, Debug)]
pub(super) struct Life {
    pub(super) optimizer: Arc<dyn Optimizer>,
    /// Whether other variables have rules of their own: `dense` LAMB, which goes over it twice, and `bias`
    /// one with another number of slots.
    pub(super) mixed: bool,
    /// Whether blocks are written past the cache.
    pub(super) past_cache: bool,
    /// Whether more clients come than the control file had room for.
    pub(super) crowd: bool,
    pub(super) planted: PlantedBugs,
    pub(super) seed: u64,
}

impl Life {
    pub(super) fn configure(&self, config: PsConfig) -> PsConfig {
        let mut rules = Rules::new(self.optimizer.clone());
        rules.optimizer_for("users".into(), Arc::new(Adagrad::new(0.5)));
        if self.mixed {
            rules.optimizer_for("dense".into(), Arc::new(Lamb::new(0.1).weight_decay(0.01)));
            rules.optimizer_for("bias".into(), Arc::new(Adagrad::new(0.5)));
        }
        let cached_bytes_max = if self.past_cache { 0 } else { config.cached_bytes_max };
        let config = config.integrity_full(true).inbox_pushes(2).lease(LEASE);
        PsConfig {
            rules,
            block_bytes: BLOCK_BYTES,
            cached_bytes_max,
            planted: self.planted,
            ..config
        }
    }
}

/// `dense` (150 f32, at 0) and `bias` (4 f32, at 600) are trained, `sums` (36 f32, at 616) and `n`
/// (1 i64, at 760) are plain: 768 bytes. `table` (40 rows of 5 f32, at 768) is sparse, and has its
/// index at 3328. `users` is a table that grows: 220 rows of 2 f32 at once, at 1568, and their ids at
/// 3496; it has room for 230 and evicts the least recent.
pub(super) fn model() -> Vec<VariableSpec> {
    vec![
        VariableSpec::f32("dense", [150]).unwrap(),
        VariableSpec::f32("bias", [4]).unwrap(),
        VariableSpec::f32("sums", [36]).unwrap().plain(),
        VariableSpec::new("n", DType::I64, Shape::new([1]).unwrap()).unwrap(),
        VariableSpec::f32("table", [40, 5]).unwrap().sparse(),
        users(),
    ]
}

fn users() -> VariableSpec {
    let users = TableSpec::new(230 * (16 + TableSpec::ROW_OVERHEAD_BYTES)).rows_at_once(220);
    let users = users.eviction(Eviction::LeastRecent).expire_after(6);
    VariableSpec::table("users", DType::F32, [2], users).unwrap()
}

pub(super) fn numbers(count: usize, seed: f32) -> Vec<u8> {
    bytes_of(&(0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect::<Vec<f32>>())
}

/// A world whose one shard lies on this shelf and has not been told anything.
pub(super) fn begin(life: &Life, shelf: Shelf) -> World {
    let optimizer = Sgd::new(1.0);
    World::on(
        super::world::LIFE,
        model(),
        optimizer,
        |config| life.configure(config),
        |_| shelf.clone(),
    )
}

/// A worker of a world whose variables are ready.
pub(super) fn begin_training(life: &Life, shelf: Shelf) -> (World, Line) {
    let mut world = begin(life, shelf);
    let line = world.join(0, &mut chief());
    let catalogue = world.catalogue.clone();
    assert!(matches!(world.declare(line, &catalogue), Message::Declared(_)));
    assert!(matches!(
        world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into()),
        Message::Ready(_)
    ));
    let line = world.join(0, &mut worker(1));
    (world, line)
}

fn give_back(grant: Grant) -> Message {
    message::ReturnToken { token: grant.token, generation: grant.generation }.into()
}

fn applied(answer: &Message) {
    assert!(matches!(answer, Message::PushAnswer(_)), "a push is answered {answer:?}");
}

/// Lives it on this shelf. The shard is shown before the first input and after each. Returns what
/// it was configured with.
pub(super) fn live(life: &Life, shelf: Shelf, mut observer: Observer) -> Arc<PsConfig> {
    let mut world = begin(life, shelf);
    observer(&world.shards[0]);
    world.observer = Some(observer);

    // Variables are declared, and declared otherwise before anybody has begun.
    let mut first = chief();
    let line = world.join(0, &mut first);
    // Those that have rules of their own are among the others, too.
    let named = model().into_iter().filter(|variable| ["dense", "bias"].contains(&variable.name()));
    let others = variables().into_iter().chain([users()]).chain(named).collect();
    let (catalogue, other) = (world.catalogue.clone(), place(others, 1));
    assert!(matches!(world.declare(line, &other), Message::Declared(_)));
    assert!(matches!(world.declare(line, &catalogue), Message::Declared(_)));

    // Some are given values before all are: in blocks of their own, and in place.
    let sums = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    applied(&world.push_answer(line, &sums, &[(616, &numbers(36, 1.0))]));
    let n = Push::plain(2, Operation::Assign {}, world.push_slot(line));
    applied(&world.push_answer(line, &n, &[(760, &bytes_of(&[7_i64]))]));
    assert!(matches!(
        world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into()),
        Message::Ready(_)
    ));

    // A worker pushes everything, and is given the next token with the answer.
    let mut peer = worker(1);
    let line = world.join(0, &mut peer);
    let all = numbers(154, 2.0);
    let push = Push { next: true, ..world.gradient(line, 1) };
    let Message::PushAnswer(answer) = world.push_answer(line, &push, &[(0, &all)]) else {
        panic!("not applied")
    };
    // A few bytes, which are changed where they lie.
    let grant = answer.next.expect("there is no end");
    let push = Push::gradient(2, grant, answer.push_slot);
    applied(&world.push_answer(line, &push, &[(600, &numbers(4, 3.0))]));
    // Rows, where they lie, one of which two blocks hold; and all of them.
    for (sequence, rows) in [(8, vec![1_u32, 2, 12, 38]), (9, (0..40).collect())] {
        let push = world.gradient(line, sequence);
        let (index, values) = (index_of(&rows), numbers(5 * rows.len(), 6.0));
        applied(&world.push_answer(line, &push, &[(3328, &index), (768, &values)]));
    }
    // Rows of a table, so many that its index gets another page; then others, for which some go. All
    // but the last expire with time.
    let pushes = [(10, 0..200_u64), (11, 190..240), (12, 3..6)];
    // In one life: it makes no difference to a table how blocks are written.
    for (sequence, ids) in pushes.into_iter().filter(|_| life.crowd) {
        let ids: Vec<u64> = ids.collect();
        let push = world.gradient(line, sequence);
        let (index, values) = (index_of(&ids), numbers(2 * ids.len(), 7.0));
        applied(&world.push_answer(line, &push, &[(3496, &index), (1568, &values)]));
    }
    let evicted = world.metrics().table_rows_evicted;
    assert_eq!(evicted > 0, life.crowd, "{evicted} rows were evicted");
    // In parts, which are applied as they come.
    let push = world.gradient(line, 3);
    let parts = [(0, &all[..256]), (256, &all[256..400]), (400, &all[400..])];
    applied(&world.push_answer(line, &push, &parts));
    // In parts whose draft comes to nothing: another push is whole before it.
    let slow = world.gradient(line, 4);
    world.send(line, slow.envelope(), slow.part(0, None), &all[..256]);
    let quick = Push::plain(5, Operation::AssignAdd {}, world.push_slot(line));
    applied(&world.push_answer(line, &quick, &[(616, &numbers(36, 4.0))]));
    let rest = slow.part(256, Some(616));
    let request = world.send(line, slow.envelope(), rest, &all[256..]);
    world.work();
    applied(&world.answer(line, request).expect("it is answered"));

    // One is withdrawn, a token comes back, and a push comes again.
    let push = world.gradient(line, 6);
    world.send(line, push.envelope(), push.part(0, None), &all[..256]);
    let withdrawn = Envelope { sequence: Sequence(6), ..Envelope::default() };
    world.send(line, withdrawn, message::Withdraw {}.into(), &[]);
    world.say(line, give_back(push.grant));
    applied(&world.push_answer(line, &quick, &[(616, &numbers(36, 4.0))]));

    // The worker starts anew while a push of its older self lies whole.
    let push = world.gradient(line, 7);
    world.push(line, &push, &[(0, &all)]);
    let line = world.join(0, &mut peer.restarted());
    let push = world.gradient(line, 1);
    world.push(line, &push, &[(600, &numbers(4, 5.0))]);
    world.work();

    // One leaves, one is lost, and the training ends.
    let other = world.join(0, &mut worker(2));
    world.token(other);
    world.say(other, message::Leave {}.into());
    let chief = world.join(0, &mut first);
    world.token(line);
    world.pass(LEASE + Duration::from_millis(50), &[chief]);
    world.say(chief, message::Finish {}.into());
    for task in 10..if life.crowd { 25 } else { 10 } {
        world.join(0, &mut worker(task));
    }
    world.config.clone()
}
