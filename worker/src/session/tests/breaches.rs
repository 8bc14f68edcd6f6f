//! Protocol violations by a server reset the connection. They never end the session or panic.

use pushpull_common::ids::{GlobalStep, RequestId, RestoreEpoch};
use pushpull_common::protocol::message::{self, CatalogueState, EndReason};
use pushpull_common::protocol::{Message, PushState, Refusal};

use super::world::{
    OWNER, SentFrame, SessionWorld, applied, grant, header, plan, push_answer, refused, shard,
    welcome,
};
use crate::session::{OpId, SessionCommand, SessionInput};

/// Returns one message of each kind that a server can send.
fn all_messages() -> Vec<Message> {
    vec![
        welcome().into(),
        refused(Refusal::NotInitialized {}),
        message::HeartbeatAnswer {}.into(),
        message::Declared {
            state: CatalogueState::Absent {},
            restore_epoch: Default::default(),
            trained: false,
        }
        .into(),
        message::Ready { digest: [0; 32] }.into(),
        message::CatalogueIs { digest: [0; 32] }.into(),
        message::Granted { grant: grant(1, 0) }.into(),
        message::Ended { reason: EndReason::Finished {} }.into(),
        message::Returned {}.into(),
        message::Reserved { push_slot: 1 }.into(),
        push_answer(applied(1)).into(),
        message::OutcomeIs { state: PushState::Unknown {} }.into(),
        message::Pulled { version: 1, gradients: 1, offset: 0, last: true }.into(),
        message::Pulled { version: 1, gradients: 1, offset: 0, last: false }.into(),
        message::PulledEncoded {
            part: message::Pulled { version: 1, gradients: 1, offset: 0, last: true },
            bytes: 16,
        }
        .into(),
        message::Finished {}.into(),
        message::Left {}.into(),
        message::Heartbeat {}.into(),
        message::StepApplied { shard: shard(0) }.into(),
    ]
}

// W-5.
#[test]
fn an_unrequested_message_resets_the_link() {
    for message in all_messages() {
        let mut world = SessionWorld::joined(&plan(1, 4));
        let header = header(RequestId(77), RestoreEpoch(0), GlobalStep(0), &message, 0);
        world.input(SessionInput::Message { link: OWNER, header, message: message.clone() });
        assert_eq!(world.closed.get(&OWNER), Some(&1), "{message:?}");
        world.wait_for_connect(OWNER);
        world.accept(OWNER);
    }
}

/// Sends one request, in a session of one shard.
fn ask(world: &mut SessionWorld, index: usize) -> (Option<OpId>, SentFrame) {
    let plan = plan(1, 4);
    let request = |message| SessionCommand::Request {
        shard: shard(0),
        message,
        body: bytes::Bytes::new(),
        wait_ms: None,
    };
    let op = match index {
        0 => Some(world.call(SessionCommand::Token)),
        1 => Some(world.pull(&plan)),
        2..=4 => Some(world.push(&plan, 1)),
        5 => Some(world.call(request(message::AwaitReady {}.into()))),
        6 => Some(world.call(request(message::FetchCatalogue {}.into()))),
        7 => Some(world.call(request(message::Leave {}.into()))),
        8 => {
            world.answers_heartbeats = false;
            world.advance(super::world::LEASE / 5);
            None
        }
        _ => {
            world.input(SessionInput::TokenDropped { grant: grant(1, 0) });
            None
        }
    };
    if index == 3 || index == 4 {
        let mut frame = world.give_push_slot(OWNER, 1).remove(0);
        if index == 4 {
            world.reconnect(OWNER);
            frame = world.next_frame(OWNER, "OutcomeQuery");
        }
        return (op, frame);
    }
    let frame = world.sent.pop_front().unwrap();
    (op, frame)
}

/// Every answer to every request, with and without a body where both are allowed. It must end the
/// operation, or reset the connection so that the session asks again.
// W-5.
#[test]
fn an_answer_that_does_not_fit_resets_the_link() {
    for index in 0..10 {
        for message in all_messages() {
            for bytes in [0, 16] {
                if Message::body_limit(message.kind()) < Some(bytes as u64) {
                    continue;
                }
                let mut world = SessionWorld::joined(&plan(1, 4));
                let (op, frame) = ask(&mut world, index);
                world.answer_header(&frame, GlobalStep(0), message.clone(), bytes);
                if bytes > 0 && !world.closed.contains_key(&OWNER) {
                    world.deliver_body(OWNER, &vec![1; bytes]);
                }
                let (name, request) = (message.name(), frame.message.name());
                let broken = world.closed.contains_key(&OWNER);
                let asked_on = !world.is_quiet(OWNER);
                let answered = op.is_none_or(|op| !world.is_pending(op));
                let more = matches!(&message, Message::Pulled(p) if index == 1 && !p.last);
                assert!(broken || answered || asked_on || more, "{name} answers {request}");
                if broken && (op.is_some() || index == 9) {
                    world.wait_for_connect(OWNER);
                    world.accept(OWNER);
                    assert!(!world.is_quiet(OWNER), "{request} is not repeated after a {name}");
                }
            }
        }
    }
}
