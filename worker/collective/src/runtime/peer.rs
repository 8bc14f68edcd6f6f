//! A control connection between two processes: small messages both ways.

use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode};
use pushpull_net::FrameStream;
use pushpull_net::auth::{Credentials, say_hello};
use tokio::sync::mpsc;

/// The most messages that wait to be sent on a control connection: all members of the largest ring,
/// twice. A peer that reads less is given up.
pub(super) const UNSENT_MAX: usize = 2 * pushpull_common::protocol::limits::RING_SIZE_MAX + 64;

/// The time for which a peer may read nothing of what is sent to it.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Proves who this side is when it says hello, and exchanges messages until the connection ends or
/// nobody has messages to send any more. Returns the cause of the end.
pub(super) async fn exchange(
    mut frames: FrameStream,
    credentials: Option<&Credentials>,
    mut unsent: mpsc::Receiver<Message>,
    mut arrived: impl FnMut(Message),
) -> String {
    loop {
        tokio::select! {
            next = frames.next() => match next {
                Ok((header, message)) if header.body_bytes == 0 => arrived(message),
                Ok((_, message)) => return format!("a {} with a body", message.name()),
                Err(error) => return Chain(&error).to_string(),
            },
            message = unsent.recv() => {
                let Some(message) = message else { return "closed".to_owned() };
                let mut bytes = Vec::new();
                match message {
                    Message::Hello(hello) => {
                        let greeting =
                            say_hello(&mut frames, credentials, Envelope::default(), hello);
                        if let Err(error) = greeting.await {
                            return Chain(&error).to_string();
                        }
                    }
                    message => {
                        encode(&mut bytes, &Envelope::default(), &message, BodyStamp::NONE);
                    }
                }
                while let Ok(message) = unsent.try_recv() {
                    encode(&mut bytes, &Envelope::default(), &message, BodyStamp::NONE);
                }
                match tokio::time::timeout(SEND_TIMEOUT, frames.send(&bytes)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return format!("it has read nothing for {SEND_TIMEOUT:?}"),
                }
            }
        }
    }
}

/// Sends one message.
pub(super) async fn send(
    frames: &mut FrameStream,
    message: impl Into<Message>,
) -> Result<(), String> {
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), &message.into(), BodyStamp::NONE);
    frames.send(&bytes).await.map_err(|error| error.to_string())
}
