//! The end of the training on all workers.

use std::time::Duration;

use pushpull_common::ids::RequestId;
use pushpull_common::protocol::message::{self, EndReason, Role};
use pushpull_common::protocol::{Envelope, Grant, Message, Refusal};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::PsConfig;
use crate::shard::ShardInput;

const LEASE: Duration = Duration::from_secs(5);

/// A world with two workers, `a` and `b`; and a reader, which waits for the end by the request.
struct Ending {
    world: World,
    a: ConnectionId,
    b: ConnectionId,
    reader: ConnectionId,
    request: RequestId,
}

impl Ending {
    fn new(configure: impl Fn(PsConfig) -> PsConfig) -> Ending {
        let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), configure);
        world.ask(chief[0], message::Leave {}.into());
        let a = world.join(0, &mut worker(1));
        let b = world.join(0, &mut worker(2));
        let mut peer = worker(3);
        peer.role = Role::Reader {};
        let reader = world.join(0, &mut peer);
        let request = world.say(reader, message::AwaitEnd {}.into());
        Ending { world, a, b, reader, request }
    }

    fn spend(&mut self, line: ConnectionId, sequence: u64, grant: Grant) {
        let push = Push::gradient(sequence, grant, self.world.push_slot(line));
        let answer = self.world.push_answer(line, &push, &[(0, &bytes_of(&[1_f32; 3]))]);
        assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    }

    fn await_end(&mut self, line: ConnectionId) -> RequestId {
        self.world.say(line, message::AwaitEnd {}.into())
    }

    fn answer(&mut self) -> Option<Message> {
        self.world.answer(self.reader, self.request)
    }
}

fn ended(reason: EndReason) -> Option<Message> {
    Some(message::Ended { reason }.into())
}

#[test]
fn the_training_ends_for_all_once_every_member_is_at_its_end() {
    let mut ending = Ending::new(|config| config.last_step(2));
    let Ending { a, b, .. } = ending;
    let first = ending.world.token(a);
    let second = ending.world.token(b);
    ending.spend(a, 1, first);
    let of_a = ending.await_end(a);
    assert_eq!(ending.world.answer(a, of_a), None, "a step is missing");
    ending.spend(b, 1, second);
    assert_eq!(ending.world.answer(a, of_a), None, "a share of the last push may be under way");
    assert_eq!(ending.answer(), None);
    let of_b = ending.await_end(b);
    let last = ended(EndReason::LastStep {});
    assert_eq!(ending.world.answer(a, of_a), last);
    assert_eq!(ending.world.answer(b, of_b), last);
    assert_eq!(ending.answer(), last);
    let again = ending.await_end(a);
    assert_eq!(ending.world.answer(a, again), last, "a request that is repeated");
}

#[test]
fn members_that_leave_or_are_lost_are_not_waited_for() {
    let mut ending = Ending::new(|config| config);
    let Ending { a, b, reader, .. } = ending;
    (_, _) = (ending.world.token(a), ending.world.token(b));
    ending.world.input(0, ShardInput::Finish);
    ending.world.ask(a, message::Leave {}.into());
    assert_eq!(ending.answer(), None, "the token of the other is outstanding");
    ending.world.pass(LEASE, &[reader]);
    assert_eq!(ending.answer(), ended(EndReason::Finished {}));
}

#[test]
fn a_member_that_never_took_a_token_is_not_waited_for() {
    let mut ending = Ending::new(|config| config);
    ending.world.input(0, ShardInput::Finish);
    assert_eq!(ending.answer(), ended(EndReason::Finished {}));
}

#[test]
fn a_member_that_takes_another_token_is_no_longer_at_its_end() {
    let mut ending = Ending::new(|config| config);
    let a = ending.a;
    let waiting = ending.await_end(a);
    let grant = ending.world.token(a);
    ending.world.input(0, ShardInput::Finish);
    ending.spend(a, 1, grant);
    assert_eq!((ending.world.answer(a, waiting), ending.answer()), (None, None));
    ending.await_end(a);
    assert_eq!(ending.world.answer(a, waiting), ended(EndReason::Finished {}));
}

#[test]
fn after_a_restart_every_member_must_report_its_end_again() {
    let mut ending = Ending::new(|config| config.last_step(1));
    let a = ending.a;
    let grant = ending.world.token(a);
    ending.spend(a, 1, grant);
    ending.world.restart(0).unwrap();
    let a = ending.world.join(0, &mut worker(1));
    let b = ending.world.join(0, &mut worker(2));
    let of_a = ending.await_end(a);
    assert_eq!(ending.world.answer(a, of_a), None, "the other may be pushing");
    ending.await_end(b);
    assert_eq!(ending.world.answer(a, of_a), ended(EndReason::LastStep {}));
}

#[test]
fn a_wait_that_is_too_long_names_the_workers_that_are_not_at_their_end() {
    let mut ending = Ending::new(|config| config);
    let Ending { a, b, .. } = ending;
    let grant = ending.world.token(b);
    let millis = |ending: &mut Ending, wait: u64| {
        let envelope = Envelope { deadline_ms: wait as u32, ..Envelope::default() };
        let request = ending.world.send(a, envelope, message::AwaitEnd {}.into(), &[]);
        ending.world.pass(Duration::from_millis(wait + 100), &[a, b]);
        match ending.world.answer(a, request) {
            Some(Message::Refused(message::Refused {
                refusal: Refusal::Deadline { awaited, .. },
            })) => awaited.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(millis(&mut ending, 200), "the end of the training");
    ending.world.input(0, ShardInput::Finish);
    let awaited = millis(&mut ending, 200);
    assert!(
        awaited.starts_with("the workers that have not ended: /job:worker/task:2"),
        "{awaited}"
    );
    let Grant { token, generation, .. } = grant;
    ending.world.ask(b, message::ReturnToken { token, generation }.into());
    ending.await_end(b);
    let last = ending.await_end(a);
    assert_eq!(ending.world.answer(a, last), ended(EndReason::Finished {}));
}
