"""Federated averaging with Flower: a server and two clients, connected over loopback.

One client has the digits 0 to 4, the other 5 to 9. Flower's FedAvg averages `session.parameters`,
weighted by rows; optimizer state stays in the clients. Then a model trained on inverted images gets
LoRA adapters, and only these are exchanged. Flower pins versions (protobuf): install it together
with ortops in a separate environment, ``pip install flwr``.
"""

import argparse
from multiprocessing import get_context

import numpy as np

import ortops
from models import digits, lenet

QUICK = {"all weights": 0.8, "adapters": 0.6}
TRAIN, TEST = ({"images": part.images, "labels": part.labels} for part in digits.load())


def run_client(number: int, model: bytes, address: str) -> None:
    """Trains one epoch on its own digits for each request of the server."""
    import flwr

    mine = (TRAIN["labels"] < 5) == (number == 0)
    session, data = ortops.TrainingSession(model), {n: a[mine] for n, a in TRAIN.items()}

    class Client(flwr.client.NumPyClient):
        def fit(self, parameters: list[np.ndarray], config: dict) -> tuple:
            session.parameters = dict(zip(session.parameters, parameters, strict=True))
            session.fit(data, progress=False)
            return list(session.parameters.values()), int(mine.sum()), {}

    flwr.client.start_client(server_address=address, client=Client().to_client(), insecure=True)


def federate(session: ortops.TrainingSession, rounds: int, address: str) -> float:
    """Runs the server and both clients; returns the accuracy of the last average."""
    import flwr

    def evaluate(number: int, arrays: list[np.ndarray], config: dict) -> tuple[float, dict]:
        session.parameters = dict(zip(session.parameters, arrays, strict=True))
        found = session.evaluate(TEST, metrics=["accuracy"])
        return found.pop("loss"), found

    first = flwr.common.ndarrays_to_parameters(list(session.parameters.values()))
    average = flwr.server.strategy.FedAvg(
        fraction_evaluate=0, evaluate_fn=evaluate, initial_parameters=first
    )
    model, new = session.model().SerializeToString(), get_context("spawn").Process
    clients = [new(target=run_client, args=(number, model, address)) for number in (0, 1)]
    for client in clients:
        client.start()
    config = flwr.server.ServerConfig(num_rounds=rounds)
    flwr.server.start_server(server_address=address, config=config, strategy=average)
    return session.evaluate(TEST, metrics=["accuracy"])["accuracy"]


def main(quick: bool) -> dict[str, float]:
    """Federates all weights, then only adapters."""
    options = {"loss": "SoftmaxCrossEntropy", "optimizer": ortops.optimizers.SGD(0.05)}
    fresh = ortops.TrainingSession(ortops.build_training_model(lenet.lenet(), **options))
    base = ortops.TrainingSession(fresh.model())
    base.fit(TRAIN | {"images": 1 - TRAIN["images"]}, epochs=20, progress=False)
    adapted = ortops.build_training_model(ortops.lora.add(base.inference_model(), 4), **options)
    sessions = {"all weights": fresh, "adapters": ortops.TrainingSession(adapted)}
    figures = {}
    for port, (name, session) in enumerate(sessions.items(), 47811):
        before = session.evaluate(TEST, metrics=["accuracy"])["accuracy"]
        size = sum(array.nbytes for array in session.parameters.values())
        figures[name] = federate(session, 10 if quick else 40, f"127.0.0.1:{port}")
        print(f"{name}, {size} bytes: accuracy {before:.3f} → {figures[name]:.3f}", flush=True)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    main(parser.parse_args().quick)
